"""How a release is made: the workflow, the image and the update bot, as far as their own tools can say offline."""

from __future__ import annotations

import json
import re
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
TOOLS = Path(sysconfig.get_path("scripts"))
WORKFLOW: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())


def said_by(tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([TOOLS / tool, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def test_zizmor_finds_nothing_wrong_with_the_workflows() -> None:
    done = said_by("zizmor", "--offline", "--no-progress", ".github/workflows")
    assert done.returncode == 0, done.stdout + done.stderr


def test_hadolint_finds_nothing_wrong_with_the_dockerfile() -> None:
    done = said_by("hadolint", "Dockerfile")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_only_what_publishes_or_signs_may_more_than_read() -> None:
    assert WORKFLOW["permissions"] == {}
    rights = {name: job["permissions"] for name, job in WORKFLOW["jobs"].items()}
    writing = {name for name, given in rights.items() if "write" in given.values()}
    assert writing == {"build", "pypi", "image"}
    assert rights["pypi"] == {"id-token": "write"}


def test_nothing_is_published_before_all_tests_passed_on_every_python_that_is_declared() -> None:
    jobs = WORKFLOW["jobs"]
    assert set(jobs["build"]["needs"]) == {"test", "pythons"}
    assert jobs["pypi"]["needs"] == jobs["image"]["needs"] == "build"
    declared = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert jobs["pythons"]["strategy"]["matrix"]["python"] == declared


def test_every_file_and_script_that_the_workflow_names_is_there() -> None:
    steps = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]
    commands = " ".join(step.get("run", "") for step in steps)
    named = set(re.findall(r"(?:scripts|\.ci)/\w+|requirements-\w+\.txt", commands))
    assert named == {".ci/run", "scripts/sbom", "requirements-dev.txt"}
    assert all((ROOT / name).is_file() for name in named)


def test_the_update_bot_sees_every_file_with_pins() -> None:
    bot = json.loads((ROOT / "renovate.json").read_text())
    (pattern,) = (one.strip("/") for one in bot["pip_requirements"]["managerFilePatterns"])
    assert all(re.search(pattern, file.name) for file in ROOT.glob("requirements*.txt"))
    assert {"docker:pinDigests", "helpers:pinGitHubActionDigests"} <= set(bot["extends"])
