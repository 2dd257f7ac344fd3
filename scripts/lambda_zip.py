"""The package for AWS Lambda: the program and its pinned dependencies as one zip file, and nothing that does not run.

`python scripts/lambda_zip.py --folder build/aws --python 3.12 --architecture arm64` makes
build/aws/dlqbatch-python3.12-arm64.zip. The same sources make the same bytes. It holds byte code too, which the Python
of the package compiles: Lambda cannot write any, and would compile every module again at each cold start.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
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
PYTHONS: Final = ("3.11", "3.12", "3.13", "3.14")

_COMMAND_LINE: Final = frozenset(
    {"alembic", "annotated-doc", "mako", "markdown-it-py", "markupsafe", "mdurl", "pygments", "rich", "shellingham"}
    | {"typer"}
)
"""Pinned packages that only the command line loads; no function does."""
_SERVICES: Final = frozenset({"rds", "s3", "secretsmanager", "sns", "sts"})
"""The services of AWS whose descriptions boto3 needs here; it brings those of 400."""
_TASK_ROOT: Final = "/var/task"
"""Where Lambda unpacks the package, for the traces of compiled files."""
_NOT_RUN: Final = frozenset({"bin", "test", "testing", "tests"})
_SOURCES: Final = frozenset({".c", ".h", ".pxd", ".pyi", ".pyx"})
# They speak of the folder as pip left it, which is not what is in the package.
_INSTALLATION: Final = frozenset({"INSTALLER", "RECORD", "REQUESTED"})
_OURS: Final = frozenset({".mako", ".py", ".sql"})
_IN_A_SERVICE: Final = 3
"""The parts of a path below a service's folder are more than these."""
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
    is_compiled: bool
    """Whether the package holds byte code."""

    def __str__(self) -> str:
        zipped = self.path.stat().st_size / MB
        return f"{self.path}: {self.files:,} files, {zipped:.1f} MB, unpacked {self.unpacked / MB:.1f} MB"


def build(folder: Path, python: str, architecture: str) -> Package:
    """Reuses the dependencies that it has put into the folder before, as long as they are the same."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"dlqbatch-python{python}-{architecture}"
    dependencies = folder / name
    compiler = find_compiler(python)
    with _alone_in(folder), tempfile.TemporaryDirectory(dir=folder, prefix=".program.") as program:
        _install(dependencies, python, architecture, compiler)
        _copy_program(Path(program))
        if compiler is not None:
            compile_all(Path(program), compiler)
        members = sorted((*_dependencies(dependencies), *_files(Path(program))))
        unpacked = sum(path.stat().st_size for _, path in members)
        if unpacked > LIMIT_MB * MB:
            size = f"{unpacked / MB:.1f} MB, and that is above {LIMIT_MB:g} MB"
            raise NotPackaged(f"{name} would be {size}. What has grown? See {dependencies}")
        zipped = _write(folder / f"{name}.zip", members)
    return Package(zipped, len(members), unpacked, is_compiled=compiler is not None)


def find_compiler(python: str) -> Path | None:
    """An interpreter of that version, whose byte code Lambda's own will load; None if there is none."""
    home = Path.home()
    places = [
        Path(os.environ.get("PYENV_ROOT", home / ".pyenv")) / "versions",
        Path(os.environ.get("UV_PYTHON_INSTALL_DIR", home / ".local" / "share" / "uv" / "python")),
    ]
    installed = (path for place in places for path in sorted(place.glob(f"*{python}.*/bin/python{python}")))
    on_the_path = shutil.which(f"python{python}")
    version = "import sys; print(sys.implementation.name, *sys.version_info[:2])"
    for candidate in (Path(sys.executable), *([Path(on_the_path)] if on_the_path else []), *installed):
        done = subprocess.run([candidate, "-I", "-c", version], capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.split() == ["cpython", *python.split(".")]:
            return candidate
    return None


def compile_all(folder: Path, compiler: Path) -> None:
    """Add byte code to a folder, the same bytes wherever the folder is.

    Lambda does not compare it with the sources, which the zip gives a time of their own: they belong together.
    """
    command = [str(compiler), "-m", "compileall", "-q", "-s", str(folder), "-p", _TASK_ROOT]
    skipped = rf"^{re.escape(str(folder))}/(.*/)?({'|'.join(sorted(_NOT_RUN))})/"
    command += ["--invalidation-mode", "unchecked-hash", "-x", skipped, str(folder)]
    variables = {"PATH": os.environ.get("PATH", os.defpath), "PYTHONHASHSEED": "0"}
    if subprocess.run(command, env=variables, stdout=sys.stderr, check=False).returncode != 0:
        raise NotPackaged(f"{compiler} could not compile {folder}; what it says is above")


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Two that package at once would write the same files."""
    number = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


def requirements() -> list[str]:
    """What the functions load, pinned."""
    lines = [line for name in REQUIREMENTS for line in (ROOT / name).read_text().splitlines() if "==" in line]
    return [line for line in lines if re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() not in _COMMAND_LINE]


def _install(target: Path, python: str, architecture: str, compiler: Path | None) -> None:
    wanted = "\n".join([*requirements(), f"compiled by {compiler}"])
    stamp = target.with_name(f"{target.name}.installed")
    if target.is_dir() and stamp.is_file() and stamp.read_text() == wanted:
        return
    unfinished = target.with_name(f"{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    # All of them are pinned; what is missing among them has to be noticed, not fetched.
    command += ["--no-deps", "--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
    command += [f"--platform={platform}_{ARCHITECTURES[architecture]}" for platform in PLATFORMS]
    command += ["--target", str(unfinished), *requirements()]
    if subprocess.run(command, check=False, stdout=sys.stderr).returncode != 0:
        raise NotPackaged(
            f"pip could not fetch the dependencies for Python {python} on {architecture}; what it says is above"
        )
    if compiler is not None:
        compile_all(unfinished, compiler)
    # What was there stays until all of the new is; without the stamp, what is half there is not taken for whole.
    stamp.unlink(missing_ok=True)
    shutil.rmtree(target, ignore_errors=True)
    unfinished.rename(target)
    stamp.write_text(wanted)


def _dependencies(folder: Path) -> Iterator[tuple[str, Path]]:
    for name, path in _files(folder):
        parts = Path(name).parts
        if _NOT_RUN.intersection(parts[:-1]) or path.suffix in _SOURCES or parts[:2] == ("boto3", "data"):
            continue
        if parts[:2] == ("botocore", "data") and len(parts) > _IN_A_SERVICE and parts[2] not in _SERVICES:
            continue
        if not (parts[0].endswith(".dist-info") and path.name in _INSTALLATION):
            yield name, path


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in folder.rglob("*"):
        if path.is_file():
            yield path.relative_to(folder).as_posix(), path


def _copy_program(folder: Path) -> None:
    names = ["handler.py", "application.properties", *([AUTHORITY] if (ROOT / AUTHORITY).is_file() else [])]
    sources = [path for path in (ROOT / "dlqbatch").rglob("*") if path.suffix in _OURS]
    for source in (*(ROOT / name for name in names), *sources):
        target = folder / source.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


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
    parser.add_argument("--architecture", choices=list(ARCHITECTURES), default="arm64")
    given = parser.parse_args()
    try:
        made = build(given.folder, given.python, given.architecture)
        print(made)
        if not made.is_compiled:
            print(
                f"There is no Python {given.python} here to compile it, so the functions start two to three times as "
                f"slowly. Install one (`uv python install {given.python}`), and package again.",
                file=sys.stderr,
            )
    except NotPackaged as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
