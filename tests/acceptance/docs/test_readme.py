from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
from program import HANGS_AFTER, ROOT, environment

if TYPE_CHECKING:
    from pathlib import Path

    from scripts.servers.management import Management

README = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [(found["kind"], found["text"]) for found in BLOCK.finditer(README)]
COMMANDS = [text for kind, text in BLOCKS if kind == "sh"]
# What pip and the commands need of a checkout.
CHECKOUT = (
    "LICENSE",
    "README.md",
    "application.properties",
    "dlqbatch",
    "examples",
    "handler.py",
    "pyproject.toml",
    "requirements.txt",
)


def paste(text: str, folder: Path, **variables: str) -> str:
    done = subprocess.run(
        ["sh", "-eu", "-c", text],
        cwd=folder,
        # pip has warnings of its own. A "no" sets its option --no-compile: only what is imported is compiled.
        env=environment() | {"PYTHONWARNINGS": "", "PIP_NO_COMPILE": "no"} | variables,
        capture_output=True,
        text=True,
        timeout=2 * HANGS_AFTER,  # it installs all that the page needs
        check=False,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A fresh one: no environment, no database."""
    for name in CHECKOUT:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tmp_path / name)
    return tmp_path


@pytest.mark.slow
def test_the_commands_of_the_readme_lead_from_nothing_to_a_retried_message(
    checkout: Path, broker_url: str, management: Management
) -> None:
    # As one script, in the order of the page, as somebody would paste them.
    said = paste(
        "".join(COMMANDS),
        checkout,
        DLQBATCH_BROKER_URL=broker_url,
        DLQBATCH_CONFIG=str(checkout / "application.properties"),
    )
    steps = (
        r"^dlqbatch \d+\.\d+\.\d+$",
        r"^order 17 failed$",
        r"^drain: ok, stopped by empty",
        r"^  delayed +1$",
        r"^drain: ok, stopped by empty",
        r"^  returned +1$",
        r"^order 17 handled, retries: 1$",
        r"^ingest: ok, stopped by empty",
    )
    place = 0
    for step in steps:
        found = re.compile(step, re.MULTILINE).search(said, place)
        assert found, (step, said)
        place = found.end()
    assert (checkout / "dlqbatch.sqlite3").exists()
    assert "retry-queue" in {one["name"] for one in management.queues()}


def test_the_worker_of_the_readme_is_the_one_that_is_run() -> None:
    (shown,) = (text for kind, text in BLOCKS if kind == "python")
    assert shown in (ROOT / "examples" / "first_retry.py").read_text()


def test_every_block_of_commands_is_run() -> None:
    assert len(BLOCKS) == README.count("```") // 2
    assert {kind for kind, _ in BLOCKS} == {"mermaid", "sh", "python", ""}
    assert (ROOT / "scripts" / "demo").stat().st_mode & 0o111  # test_demo.py runs it
