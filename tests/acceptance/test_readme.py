from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from program import ROOT, environment

if TYPE_CHECKING:
    from scripts.servers.management import Management

README = (ROOT / "README.md").read_text()
BLOCK = re.compile(
    r"^```(?P<kind>sh|cron)\n(?P<text>.*?)^```\n(?:\n<!-- not run here: (?P<reason>.*?) -->)?", re.MULTILINE | re.DOTALL
)
INSTALLED = ("handler.py", "application.properties", "requirements.txt", "dlqbatch")
PLACE = "/opt/dlqbatch"
LINK = re.compile(r"\]\((?!https?:|#)(?P<target>[^)#]+)")


class Block(NamedTuple):
    kind: str
    text: str
    reason: str | None


BLOCKS = [Block(found["kind"], found["text"], found["reason"]) for found in BLOCK.finditer(README)]


def in_shell(text: str, folder: Path, **variables: str) -> str:
    done = subprocess.run(
        ["sh", "-eu", "-c", text],
        cwd=folder,
        env=environment() | {"PYTHONWARNINGS": ""} | variables,  # pip has warnings of its own
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A fresh one: no environment, no database."""
    for name in INSTALLED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tmp_path / name)
    return tmp_path


@pytest.mark.slow
def test_the_commands_of_the_readme_lead_from_nothing_to_a_first_run(
    checkout: Path, broker_url: str, management: Management
) -> None:
    variables = {"DLQBATCH_BROKER_URL": broker_url, "DLQBATCH_CONFIG": str(checkout / "application.properties")}
    # As one script, in the order of the page, as somebody would paste them.
    said = in_shell("".join(one.text for one in BLOCKS if one.kind == "sh" and not one.reason), checkout, **variables)
    assert "'orders.eu.created': 'orders.*.created' in row 1 of dlq_event_config: 3 retries" in said
    assert "dry run of drain: ok" in said
    assert "\ndrain: ok, stopped by empty" in said
    assert (checkout / "dlqbatch.sqlite3").exists()
    assert "retry-queue" in {one["name"] for one in management.queues()}

    (cron,) = (one.text for one in BLOCKS if one.kind == "cron")
    *schedule, command = cron.strip().split(maxsplit=5)
    assert schedule == ["*"] * 5
    assert "%" not in command  # cron takes it for the end of the line
    assert in_shell(command.replace(PLACE, str(checkout)), Path("/"), **variables) == ""  # cron mails what it prints
    (line,) = (checkout / "dlqbatch.log").read_text().splitlines()
    assert json.loads(line)["fields"]["outcome"] == "ok"


def test_only_blocks_that_say_why_are_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    left_out = [one for one in BLOCKS if one.reason]
    for one in left_out:
        with capsys.disabled():
            sys.stdout.write(f"\nREADME.md, not run here: {one.text.strip()} ({one.reason})\n")
    assert [one.text.strip() for one in left_out] == ["scripts/demo", "scripts/test"]
    for one in left_out:
        assert (ROOT / one.text.strip()).stat().st_mode & 0o111
    for test in re.findall(r"tests/\S+\.py", " ".join(one.reason or "" for one in left_out)):
        assert (ROOT / test).exists()
    assert len(BLOCKS) == README.count("```") // 2


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", "docs/cli.md", "docs/drain.md"])
def test_every_link_leads_to_a_file(page: str) -> None:
    for found in LINK.finditer((ROOT / page).read_text()):
        assert (ROOT / page).parent.joinpath(found["target"]).exists(), found["target"]
