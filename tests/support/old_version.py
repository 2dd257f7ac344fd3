"""The program as an earlier commit of this repository has it, beside that of today; both with the same packages."""

from __future__ import annotations

import contextlib
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from forked_program import Warm
from program import HANGS_AFTER, ROOT, Finished, environment

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SCHEMAS = {
    "0009": "d3ef45351012a000b3094d011ca4d44fd3f9fc5b",
    "0008": "21206d99002436a008ac407f5da3148a0309cf4c",
}
"""The last two schema versions before today's that were published, and the last commit of each."""


@dataclass(frozen=True)
class Version:
    """A program and its settings; each command is a process, forked from one that has loaded it."""

    folder: Path
    settings: Mapping[str, str]
    warm: Warm

    def run(self, *arguments: str) -> Finished:
        code, *said = self.warm.run(arguments, environment(**self.settings), str(self.folder), HANGS_AFTER)
        return Finished(code, *(part.decode() for part in said), 0.0)


@contextlib.contextmanager
def version_of(folder: Path, settings: Mapping[str, str]) -> Iterator[Version]:
    warm = Warm(str(folder / "handler.py"), environment())
    try:
        yield Version(folder, settings, warm)
    finally:
        warm.close()


def checked_out(commit: str, folder: Path) -> Path:
    """The sources of a commit, from the history that a clone has."""
    shallow = subprocess.run(
        ["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    if shallow.stdout.strip() == "true":
        pytest.skip("a shallow clone has no older version; get it by: git fetch --unshallow")
    archive = subprocess.run(
        ["git", "archive", commit, "handler.py", "dlqbatch"], cwd=ROOT, capture_output=True, check=False
    )
    assert archive.returncode == 0, archive.stderr.decode()
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder
