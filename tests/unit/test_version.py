"""The version stands in one place, and every form of the program and every file that names it says the same."""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
import zipfile
from importlib import import_module
from typing import TYPE_CHECKING

import pytest
from program import ROOT, Program

from dlqbatch import __version__
from scripts import lambda_zip

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("start", [("handler.py",), ("-m", "dlqbatch")], ids=["handler.py", "the module"])
def test_a_copied_folder_says_its_version(tmp_path: Path, start: tuple[str, ...]) -> None:
    """As the image, the zip for Lambda and a machine have it: copied, not installed."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "dlqbatch", tmp_path / "dlqbatch", ignore=ignored)
    shutil.copy(ROOT / "handler.py", tmp_path)
    done = Program({}, (sys.executable, *start)).run("--version", cwd=tmp_path)
    assert (done.code, done.out) == (0, f"dlqbatch {__version__}\n"), done.said


def test_the_zip_for_lambda_says_its_version(tmp_path: Path) -> None:
    lambda_zip._copy_program(tmp_path / "program")
    archive = lambda_zip._write(tmp_path / "dlqbatch.zip", list(lambda_zip._files(tmp_path / "program")))
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(tmp_path / "task")
    done = Program({}, (sys.executable, "handler.py")).run("--version", cwd=tmp_path / "task")
    assert (done.code, done.out) == (0, f"dlqbatch {__version__}\n"), done.said


def test_what_is_installed_has_the_same_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    module, _, name = project["tool"]["setuptools"]["dynamic"]["version"]["attr"].rpartition(".")
    assert getattr(import_module(module), name) == __version__


def test_every_file_that_names_the_version_names_this_one() -> None:
    label = re.findall(r'image\.version="([^"]*)"', (ROOT / "Dockerfile").read_text())
    assert label == [__version__]
    named = {
        (file.name, version)
        for folder in ("deploy", "docs")
        for file in (ROOT / folder).rglob("*")
        if file.suffix in {".yaml", ".yml", ".md"}
        for version in re.findall(r"\bdlqbatch:(\d[\w.]*)", file.read_text())
    }
    assert {version for _, version in named} == {__version__}, named
