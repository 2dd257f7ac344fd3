"""The package for AWS Lambda: the program and its pinned dependencies as one zip file, and nothing that does not run.

`python scripts/lambda_zip.py --folder build/aws --python 3.12 --architecture x86_64` makes
build/aws/dlqbatch-python3.12-x86_64.zip. The same sources make the same bytes.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).resolve().parents[1]
LIMIT_MB: Final = 120.0
MB: Final = 1_000_000
REQUIREMENTS: Final = ("requirements-aws.txt", "requirements.txt")
# What pip may choose from: glibc 2.17, and 2.28 where a package has nothing older. Lambda has 2.34.
PLATFORMS: Final = ("manylinux2014", "manylinux_2_28")
# By AWS's name for a machine: that of Python's packages.
ARCHITECTURES: Final = {"x86_64": "x86_64", "arm64": "aarch64"}

AUTHORITY: Final = "ca.pem"
"""The certificates of those who sign the database's, if they are here: for sslmode=verify-full."""
PYTHONS: Final = ("3.11", "3.12", "3.13")

_NOT_RUN: Final = frozenset({"__pycache__", "bin", "test", "testing", "tests"})
_SOURCES: Final = frozenset({".c", ".h", ".pxd", ".pyc", ".pyi", ".pyx"})
# They speak of the folder as pip left it, which is not what is in the package.
_INSTALLATION: Final = frozenset({"INSTALLER", "RECORD", "REQUESTED"})
_OURS: Final = frozenset({".mako", ".py", ".sql"})
_WHEN: Final = (1980, 1, 1, 0, 0, 0)
_ALL_MAY_READ: Final = 0o100644 << 16


class NotPackaged(Exception):
    """What went wrong, in words for whoever packages."""


@dataclass(frozen=True, slots=True)
class Package:
    path: Path
    files: int
    unpacked: int
    """Bytes, which Lambda limits to 250 MiB."""

    def __str__(self) -> str:
        zipped = self.path.stat().st_size / MB
        return f"{self.path}: {self.files:,} files, {zipped:.1f} MB, unpacked {self.unpacked / MB:.1f} MB"


def build(folder: Path, python: str, architecture: str) -> Package:
    """Reuses the dependencies that it has put into the folder before, as long as they are the same."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"dlqbatch-python{python}-{architecture}"
    dependencies = folder / name
    with _alone_in(folder):
        _install(dependencies, python, architecture)
        members = sorted((*_dependencies(dependencies), *_program()))
        unpacked = sum(path.stat().st_size for _, path in members)
        if unpacked > LIMIT_MB * MB:
            size = f"{unpacked / MB:.1f} MB, and that is above {LIMIT_MB:g} MB"
            raise NotPackaged(f"{name} would be {size}. What has grown? See {dependencies}")
        return Package(_write(folder / f"{name}.zip", members), len(members), unpacked)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Two that package at once would write the same files."""
    number = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


def _install(target: Path, python: str, architecture: str) -> None:
    wanted = hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in REQUIREMENTS)).hexdigest()
    stamp = target.with_name(f"{target.name}.installed")
    if target.is_dir() and stamp.is_file() and stamp.read_text() == wanted:
        return
    unfinished = target.with_name(f"{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    # All of them are pinned; what is missing among them has to be noticed, not fetched.
    command += ["--no-deps", "--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
    command += [f"--platform={platform}_{ARCHITECTURES[architecture]}" for platform in PLATFORMS]
    command += ["--target", str(unfinished), "-r", str(ROOT / REQUIREMENTS[0])]
    if subprocess.run(command, check=False, stdout=sys.stderr).returncode != 0:
        raise NotPackaged(
            f"pip could not fetch the dependencies for Python {python} on {architecture}; what it says is above"
        )
    # What was there stays until all of the new is; without the stamp, what is half there is not taken for whole.
    stamp.unlink(missing_ok=True)
    shutil.rmtree(target, ignore_errors=True)
    unfinished.rename(target)
    stamp.write_text(wanted)


def _dependencies(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        in_metadata = name.parts[0].endswith(".dist-info")
        if path.is_dir() or _NOT_RUN.intersection(name.parts[:-1]) or path.suffix in _SOURCES:
            continue
        if not (in_metadata and path.name in _INSTALLATION):
            yield name.as_posix(), path


def _program() -> Iterator[tuple[str, Path]]:
    for name in ("handler.py", "application.properties"):
        yield name, ROOT / name
    authority = ROOT / AUTHORITY
    if authority.is_file():
        yield AUTHORITY, authority
    for path in (ROOT / "dlqbatch").rglob("*"):
        if path.suffix in _OURS:
            yield path.relative_to(ROOT).as_posix(), path


def _write(target: Path, members: list[tuple[str, Path]]) -> Path:
    unfinished = target.with_suffix(".unfinished")
    with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in members:
            about = zipfile.ZipInfo(name, _WHEN)
            about.compress_type = zipfile.ZIP_DEFLATED
            about.external_attr = _ALL_MAY_READ
            archive.writestr(about, path.read_bytes())
    return unfinished.replace(target)


def main() -> int:
    parser = argparse.ArgumentParser(description="Makes the package for AWS Lambda.")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "aws")
    parser.add_argument("--python", choices=PYTHONS, default="3.12")
    parser.add_argument("--architecture", choices=list(ARCHITECTURES), default="x86_64")
    given = parser.parse_args()
    try:
        print(build(given.folder, given.python, given.architecture))
    except NotPackaged as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
