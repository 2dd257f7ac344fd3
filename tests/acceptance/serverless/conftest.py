"""The package and the templates, made once; and two stacks of them, deployed into one account."""

from __future__ import annotations

import fcntl
import os
import platform
import sys
import zipfile
from typing import TYPE_CHECKING

import pytest
from serverless_template import EVERYTHING, NEXT_TO_NOTHING, Account, Stack, package, template

from scripts import lambda_zip

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stage `prod` with every parameter given, and `dev` without even metrics; made once, by the first worker."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "packages"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "said").exists():
            said = package(folder, "prod", *EVERYTHING)
            template(folder, "dev", *NEXT_TO_NOTHING)
            (folder / "said").write_text(said)
    return folder


@pytest.fixture(scope="session")
def zipped(packages: Path) -> Path:
    return packages / "dlqbatch-python3.12-arm64.zip"


@pytest.fixture(scope="session")
def task(packages: Path) -> Path:
    """The package unpacked, as Lambda has it in /var/task; for the Python that runs the tests, so that it can run."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    architecture = {"aarch64": "arm64"}.get(platform.machine(), platform.machine())
    folder = packages / "task"
    with (packages / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            made = lambda_zip.build(packages, python, architecture)
            with zipfile.ZipFile(made.path) as archive:
                archive.extractall(packages / "unfinished")
            (packages / "unfinished").rename(folder)
    return folder


@pytest.fixture(scope="module")
def account(aws_server: str) -> Account:
    return Account(aws_server)


@pytest.fixture(scope="module")
def prod(account: Account, packages: Path, zipped: Path) -> Stack:
    return account.deploy(packages / "prod", zipped)


@pytest.fixture(scope="module")
def dev(account: Account, packages: Path, zipped: Path) -> Stack:
    return account.deploy(packages / "dev", zipped)


@pytest.fixture(params=["prod", "dev"])
def stack(request: pytest.FixtureRequest) -> Stack:
    found: Stack = request.getfixturevalue(request.param)
    return found
