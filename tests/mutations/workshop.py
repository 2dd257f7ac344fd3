"""A copy of the project with one fault in it, and the tests that have to notice it, run in that copy."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from xml.etree import ElementTree as ET

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mutations.catalogue import Mutation

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 300.0
"""For the tests of one fault; each test has its own limit within."""
_SETTLES = 20.0
_ALL_PASSED, _SOME_FAILED = 0, 1
_COPIED = ("dlqbatch", "tests", "scripts", "sql", "benchmarks", "examples", "deploy", "docs")
_running: list[subprocess.Popen[str]] = []
_NOT_COPIED = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info")


class Stale(Exception):
    """A text is not in the program any more, or not once."""


class Verdict(NamedTuple):
    name: str
    is_caught: bool
    by: str
    """The first test that failed; or why there is none."""
    seconds: float

    def as_dict(self) -> dict[str, object]:
        return {"name": self.name, "caught": self.is_caught, "by": self.by, "seconds": round(self.seconds, 1)}


def mutated(mutation: Mutation, root: Path = ROOT) -> dict[str, str]:
    """The text of each file with the fault in it."""
    texts: dict[str, str] = {}
    for change in mutation.changes:
        text = texts.get(change.file) or (root / change.file).read_text(encoding="utf-8")
        found = text.count(change.old)
        if found != 1:
            raise Stale(f"{mutation.name}: {change.file} holds this {found} times, not once: {change.old!r}")
        texts[change.file] = text.replace(change.old, change.new)
    for file, text in texts.items():
        compile(text, file, "exec")
    return texts


@contextmanager
def copy(mutation: Mutation | None, bench: Path) -> Iterator[Path]:
    """The project in a folder of its own below `bench`, with the fault if there is one."""
    folder = bench / (mutation.name if mutation else "no-fault")
    try:
        for name in _COPIED:
            shutil.copytree(ROOT / name, folder / name, ignore=_NOT_COPIED)
        for file in ROOT.iterdir():
            if file.is_file() and not file.name.startswith("."):
                shutil.copy2(file, folder / file.name)
        for name, text in (mutated(mutation, folder) if mutation else {}).items():
            (folder / name).write_text(text, encoding="utf-8")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def attempt(mutation: Mutation, bench: Path) -> Verdict:
    """Whether its tests notice it."""
    began = time.monotonic()
    with copy(mutation, bench) as folder:
        code, failed, said = _pytest(folder, mutation.tests)
    seconds = time.monotonic() - began
    if code is None:
        return Verdict(
            mutation.name, is_caught=False, by=f"its tests did not end within {SECONDS:g} s", seconds=seconds
        )
    if code == _SOME_FAILED and failed:
        return Verdict(mutation.name, is_caught=True, by=failed, seconds=seconds)
    if code == _ALL_PASSED:
        return Verdict(mutation.name, is_caught=False, by="all its tests passed", seconds=seconds)
    return Verdict(mutation.name, is_caught=False, by=f"pytest ended with {code}: {said[-1500:]}", seconds=seconds)


def passes(tests: Sequence[str], bench: Path) -> str | None:
    """None if they pass in a copy without any fault, else what failed."""
    with copy(None, bench) as folder:
        code, failed, said = _pytest(folder, tests, patience=4 * SECONDS)
    return None if code == _ALL_PASSED else failed or said[-1500:]


def _pytest(folder: Path, tests: Sequence[str], patience: float = SECONDS) -> tuple[int | None, str, str]:
    """Exit code (None: it did not end), the first test that failed, and what was said."""
    report = folder / "report.xml"
    # What the copy imports is the copy: an installed dlqbatch comes behind it. Set, and not only in pytest's own
    # settings, for the processes that the tests start.
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (folder, folder / "tests", folder / "tests" / "support"))),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    # A fault may make a test wait for what never comes: it has to give up before its own time here is over.
    environment["DLQBATCH_TEST_HANGS_AFTER"] = f"{SECONDS / 5:g}"
    check = "import dlqbatch, sys; sys.exit(not dlqbatch.__file__.startswith(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", check, str(folder)], cwd=folder, env=environment, check=True)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as run:
        _running.append(run)
        try:
            said, _ = run.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            _end(run)
            return None, "", ""
        except BaseException:
            _end(run)
            raise
        finally:
            _running.remove(run)
    return run.returncode, _first_failure(report), said


def end_all() -> None:
    """What is at work in other threads; each ends what it has started itself."""
    for run in _running[:]:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGINT)


def _end(run: subprocess.Popen[str]) -> None:
    """Ask first: a test that ends in order ends what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(run.pid, signal.SIGINT)
    try:
        run.communicate(timeout=_SETTLES)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.communicate()


def _first_failure(report: Path) -> str:
    if not report.exists():
        return ""
    for case in ET.parse(report).iter("testcase"):
        for kind in ("failure", "error"):
            if case.find(kind) is not None:
                return f"{case.get('classname')}::{case.get('name')}"
    return ""
