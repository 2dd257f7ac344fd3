"""The wheel: what is in it, and that the program works from it alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
from program import HANGS_AFTER, ROOT

pytestmark = pytest.mark.slow
NOT_SOURCES = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "*.sqlite3*")
EVERY_HELP = """
import contextlib, io, json
from typer.main import get_command
from dlqbatch import cli
from dlqbatch.cli.commands import application

def commands(command, *words):
    yield words
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, *words, name)

answers = {}
for words in commands(get_command(application())):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            code = cli.main([*words, "--help"])
        except SystemExit as error:
            code = error.code
    answers[" ".join(words)] = [code, said.getvalue()]
print(json.dumps(answers))
"""


class Installed(NamedTuple):
    wheel: Path
    python: Path
    folder: Path

    def run(self, *words: str | Path) -> str:
        """Isolated: neither the folder it runs in nor PYTHONPATH is looked into."""
        done = subprocess.run(
            [*map(str, words)],
            cwd=self.folder,
            env={},
            capture_output=True,
            text=True,
            timeout=HANGS_AFTER,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """In an environment with nothing else; its dependencies are those of the tests' environment."""
    folder = tmp_path_factory.mktemp("wheel")
    # A build leaves files in its folder, and would take what an earlier one has left.
    shutil.copytree(ROOT, folder / "sources", ignore=NOT_SOURCES)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    called([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(folder / "sources")])
    (wheel,) = folder.glob("*.whl")
    environment = folder / "environment"
    python = environment / "bin" / "python"
    venv.create(environment)
    called([*pip, "--python", str(python), "install", "--no-deps", str(wheel)])
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return Installed(wheel, python, folder)


def called(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_AFTER, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_holds_every_file_of_the_package_and_the_handler_and_nothing_else(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = [path for path in (ROOT / "dlqbatch").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert found == {str(path.relative_to(ROOT)) for path in sources} | {"handler.py"}


def test_every_command_answers_help(installed: Installed) -> None:
    answers = json.loads(installed.run(installed.python, "-I", "-c", EVERY_HELP))
    assert len(answers) > 20
    assert {name: answer for name, answer in answers.items() if answer[0] or "Usage" not in answer[1]} == {}
    assert "Usage" in installed.run(installed.python.with_name("dlqbatch"), "--help")


def test_it_makes_the_tables_and_prints_the_grants(installed: Installed) -> None:
    program = installed.python.with_name("dlqbatch")
    made = installed.folder / "made.sqlite3"
    installed.run(program, "db", "upgrade", "-s", f"database_url=sqlite:///{made}")
    assert made.stat().st_size > 0
    assert "GRANT" in installed.run(program, "db", "grants")
