"""What docs/clients shows: its code is that of the workers which run here, and its commands do what they say."""

from __future__ import annotations

import re
import shlex
import sys
from typing import TYPE_CHECKING

import pytest
from client_loop import WORKERS, code_of
from program import ROOT, eventually

if TYPE_CHECKING:
    from client_loop import Loop

SHOWN = [
    ("celery.md", "python", ["celery_worker.py"]),
    ("dramatiq.md", "python", ["dramatiq_worker.py"]),
    ("faststream.md", "python", ["faststream_worker.py", "aio_pika_worker.py"]),
    ("rascal.md", "js", ["rascal_worker.js"]),
    ("taskiq.md", "python", ["taskiq_worker.py"]),
]
RUN_AS_THEY_STAND = {
    *(("kombu.md", "python"), ("nestjs.md", "js"), ("moleculer.md", "js"), ("spring.md", "java")),
    *(("symfony.md", "php"), ("symfony.md", "yaml"), ("README.md", "sh")),
}
"""Blocks that a test takes out of their page, and one whose headers are compared."""
DOES_NOT_APPLY = "\N{EN DASH}"
COLUMNS = ("fails", "comes back", "exhausted", "error", "replay", "resolved")
CARE = re.compile(r"\[[^\]]+\]\(([^)#]+)(?:#([^)]*))?\)")
SETUP, FAILING, MENDED = (
    [shlex.split(line, comments=True) for line in block.splitlines()] for block in code_of("README.md", "sh")
)


@pytest.mark.parametrize(("page", "language", "workers"), SHOWN, ids=[page for page, _, _ in SHOWN])
def test_the_code_of_a_page_is_that_of_a_worker(page: str, language: str, workers: list[str]) -> None:
    blocks = code_of(page, language)
    assert len(blocks) == len(workers)
    for block, worker in zip(blocks, workers, strict=True):
        lines = iter(re.sub("  # noqa.*", "", line).strip() for line in (WORKERS / worker).read_text().splitlines())
        for line in block.splitlines():
            assert line.strip() in lines, line


def test_no_page_shows_code_that_nothing_compares() -> None:
    shown = {
        (page.name, language)
        for page in (ROOT / "docs" / "clients").glob("*.md")
        for language in re.findall(r"^```(\w+)$", page.read_text(), re.MULTILINE)
    }
    assert shown == {(page, language) for page, language, _ in SHOWN} | RUN_AS_THEY_STAND


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("| ").split("|")]


def test_nothing_fails_in_the_table_of_what_was_tested_and_each_care_leads_to_its_page() -> None:
    pages = ROOT / "docs" / "clients"
    text = (pages / "README.md").read_text()
    section = text.partition("## How far each was tested\n")[2].partition("\n## ")[0]
    heading, _, *rows = (line for line in section.splitlines() if line.startswith("|"))
    assert tuple(cells(heading)[1:-1]) == COLUMNS
    tests = "".join(file.read_text() for file in sorted((ROOT / "tests" / "interop").glob("test_*.py")))
    tested = re.findall(r'^@pytest.mark.usefixtures\("on_every_broker"\)\ndef (\w+)\(', tests, re.MULTILINE)
    for row in rows:
        client, *outcomes, test = cells(row)
        assert len(outcomes) == len(COLUMNS), client
        assert test.strip("`") in tested, client
        for outcome in outcomes:
            if outcome not in {"ok", DOES_NOT_APPLY}:
                care = CARE.fullmatch(outcome)
                assert care, (client, outcome)
                assert (pages / care[1]).is_file(), outcome
    first = [cells(line) for line in text.partition("\n## ")[0].splitlines() if line.endswith("|")]
    named = {CARE.sub("", row[0]) or row[0] for row in first if "**tested**" in row[-1]}
    assert all(CARE.match(name)[1] in "".join(rows) for name in named)


@pytest.mark.slow
def test_the_commands_of_the_page_lead_a_failure_to_a_replay_that_is_handled(loop: Loop) -> None:
    (recipe,) = code_of("../failure-contract.md", "python")
    (loop.folder / "recipe.py").write_text(recipe)

    def paste(words: list[str]) -> str:
        assert words[0] == "dlqbatch"
        done = loop.program.run(*words[1:])
        assert done.code == 0, done.said
        return done.out

    export, *commands = SETUP
    assert export == ["export", f"DLQBATCH_ORIGINS_ALLOWED={loop.program.settings['origins_allowed']}"]
    for command in commands:
        paste(command)
    loop.team.channel.queue_declare("orders", durable=True)
    loop.team.publish("", "orders", b"declined-1")
    loop.start(sys.executable, str(WORKERS / "pika_worker.py"))
    *drains, ingest, groups = FAILING
    for drain, queue, outcome in zip(
        drains,
        ("retry-queue", "retry-queue-1", "retry-queue"),
        ("delayed", "returned", "retries-exhausted"),
        strict=True,
    ):
        loop.await_depth(queue, 1)
        assert outcome in paste(drain)
    assert "recorded" in paste(ingest)
    assert "PaymentDeclined" in paste(groups)

    (loop.folder / "mended").touch()
    replay, *settle, resolved = MENDED
    paste(replay)
    loop.await_calls("handled", 1)

    def is_resolved() -> bool:
        for job in settle:
            paste(job)
        return "PaymentDeclined" in loop.program.run(*resolved[1:]).out

    assert eventually(is_resolved), loop.program.run("status").said
