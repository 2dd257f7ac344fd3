from __future__ import annotations

import hashlib
import json
import marshal
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from importlib.util import MAGIC_NUMBER
from pathlib import Path

import pytest
from program import HANGS_AFTER
from serverless_template import EVERYTHING, JOBS, ROOT, as_lambda

from scripts import lambda_parameters, lambda_zip

OF_THESE = ("annotated-doc", "mako", "markdown-it-py", "markupsafe", "mdurl", "pygments", "rich", "shellingham")


def pinned(*names: str) -> dict[str, str]:
    lines = [line for name in names for line in (ROOT / name).read_text().splitlines() if "==" in line]
    return {
        re.sub(r"[-_.]+", "-", name).lower(): version for name, _, version in (one.partition("==") for one in lines)
    }


def test_the_package_holds_the_program_its_pinned_dependencies_and_nothing_else(zipped: Path) -> None:
    with zipfile.ZipFile(zipped) as archive:
        names = archive.namelist()
        metadata = [name for name in names if name.endswith(".dist-info/METADATA")]
        headers = [archive.read(name).decode().partition("\n\n")[0] for name in metadata]
    found = {
        re.sub(r"[-_.]+", "-", re.findall(r"^Name: (\S+)", header, re.MULTILINE)[0]).lower(): re.findall(
            r"^Version: (\S+)", header, re.MULTILINE
        )[0]
        for header in headers
    }
    every = pinned("requirements.txt", "requirements-aws.txt")
    assert found == {name: every[name] for name in found}
    assert set(every) - set(found) == {"typer", "alembic", *OF_THESE}, "only the command line loads them"

    sources = {name for name in names if not name.endswith(".pyc")}
    assert {name for name in sources if name.startswith("dlqbatch/")} == {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "dlqbatch").rglob("*")
        if path.suffix in {".py", ".sql", ".mako"}
    }
    assert {"handler.py", "application.properties"} < set(names)

    parts = [Path(name).parts for name in names]
    assert [name for name in names if name.endswith((".pyi", ".c"))] == []
    assert [one for one in parts if {"tests", "testing", "bin"}.intersection(one[:-1])] == []
    described = {
        one[2] for one in parts if one[:2] == ("botocore", "data") and len(one) > len(("botocore", "data", "s3"))
    }
    assert described == {"rds", "s3", "secretsmanager", "sns", "sts"}
    # What is at the top came with a distribution or is ours.
    installed = zipped.with_suffix("")
    assert {one[0] for one in parts} - {path.name for path in installed.iterdir()} == {
        "handler.py",
        "application.properties",
        "dlqbatch",
    }
    assert len(names) == len(set(names))


def test_the_package_is_below_its_limit_and_its_size_is_told(packages: Path, zipped: Path) -> None:
    with zipfile.ZipFile(zipped) as archive:
        unpacked = sum(one.file_size for one in archive.infolist())
        readable = {one.external_attr >> 16 & 0o444 for one in archive.infolist()}
    said = (packages / "said").read_text()
    assert unpacked < 120_000_000
    assert f"unpacked {unpacked / 1e6:.1f} MB" in said
    assert str(zipped) in said
    assert readable == {0o444}, "Lambda runs it as another user"


def kind_of(package: Path) -> tuple[str, str]:
    """Its Python and its architecture."""
    ((python, architecture),) = re.findall(r"python([\d.]+)-(\w+)", package.stem)
    return python, architecture


def test_every_module_has_byte_code_that_is_loaded_without_a_look_at_its_source(task: Path) -> None:
    compiled = {path.parent.parent / f"{path.stem.partition('.')[0]}.py": path for path in task.rglob("*.pyc")}
    assert set(compiled) == set(task.rglob("*.py"))
    unchecked_hash = (1).to_bytes(4, "little")
    assert {path.read_bytes()[:8] for path in compiled.values()} == {MAGIC_NUMBER + unchecked_hash}
    traced = marshal.loads((task / "__pycache__" / f"handler.{sys.implementation.cache_tag}.pyc").read_bytes()[16:])
    assert traced.co_filename == "/var/task/handler.py"


def test_byte_code_does_not_depend_on_the_folder_in_which_it_is_made(tmp_path: Path) -> None:
    made = []
    for name in ("here", "tests/there"):
        folder = tmp_path / name
        shutil.copytree(ROOT / "dlqbatch", folder / "dlqbatch", ignore=shutil.ignore_patterns("__pycache__"))
        lambda_zip.compile_all(folder, Path(sys.executable))
        made.append({path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.pyc")})
    assert made[0] == made[1]
    assert len(made[0]) == len([*(tmp_path / "here").rglob("*.py")])


def test_every_library_in_it_is_for_the_processor_that_the_function_has(zipped: Path) -> None:
    machines = {"x86_64": 62, "arm64": 183}  # EM_X86_64 and EM_AARCH64 in elf.h
    with zipfile.ZipFile(zipped) as archive:
        libraries = [name for name in archive.namelist() if ".so" in Path(name).suffixes]
        found = {int.from_bytes(archive.read(name)[18:20], "little") for name in libraries}
    assert len(libraries) > 5
    assert found == {machines[kind_of(zipped)[1]]}


def test_the_same_sources_make_the_same_bytes(packages: Path, zipped: Path) -> None:
    """Then a deployment without a change says so, and changes nothing."""
    before = hashlib.sha256(zipped.read_bytes()).digest()
    again = lambda_zip.build(packages, *kind_of(zipped))
    assert again.path == zipped
    assert hashlib.sha256(zipped.read_bytes()).digest() == before


def test_a_package_above_the_limit_fails_and_names_the_folder_to_look_into(
    packages: Path, zipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lambda_zip, "LIMIT_MB", 1.0)
    with pytest.raises(lambda_zip.NotPackaged, match=r"above 1 MB.*dlqbatch-python3.12-arm64"):
        lambda_zip.build(packages, *kind_of(zipped))


def test_every_package_of_the_tool_that_deploys_is_pinned_by_its_content() -> None:
    lock = json.loads((ROOT / "scripts" / "serverless" / "package-lock.json").read_text())
    packages = {name: one for name, one in lock["packages"].items() if name}
    assert "node_modules/osls" in packages
    assert [name for name, one in packages.items() if not one["integrity"].startswith("sha512-")] == []


def packaging(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts" / "package", *arguments], capture_output=True, text=True, timeout=HANGS_AFTER, check=False
    )


@pytest.mark.parametrize(
    "arguments",
    [
        *(("--stage", "Not/One"), ("--stage",), ("--output",), ("--param",)),
        *(("--python", "3.10"), ("--python=3.15",), ("--architecture", "ppc64le")),
    ],
)
def test_packaging_refuses_what_it_cannot_understand(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = packaging("--output", str(tmp_path / "made"), *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert arguments[-1].rpartition("=")[2] in done.stderr
    assert not (tmp_path / "made").exists()


def test_packaging_lists_every_parameter_that_would_not_work_and_makes_nothing(tmp_path: Path) -> None:
    wrong = {
        "subnet=subnet-1": "is subnets meant?",
        "python=3.13": "--python",
        "subnets=subnet-1a": "give both or neither",
        "depth=many": "whole number",
        "retainMemory=64": "128",
        "logLevel=loud": "debug, info, warning or error",
        "drainMessages=0": "at least 1",
        "metricsNamespace=AWS/Lambda": "not AWS/",
        "failingMinutes=6": "from 1 to 5",
        "logRetentionDays=31": "30",
        "check=maybe": "true, false",
        "secret=arn:aws:secretsmanager:…": "not its ARN",
        "secretKey=alias/mine": "ARN",
        "databaseSecret=rds!db-1": "ARN",
        "alertEmail=nobody": "e-mail",
    }
    done = packaging("--output", str(tmp_path / "made"), *(f"--param={parameter}" for parameter in wrong))
    assert (done.returncode, done.stdout) == (2, "")
    lines = done.stderr.splitlines()
    for parameter, words in wrong.items():
        name = parameter.partition("=")[0]
        assert [line for line in lines if line.startswith(f"  {name}") and words in line], (parameter, done.stderr)
    assert "metricsNamespace, retainMemory" in lines[-1]
    assert not (tmp_path / "made").exists()


def test_the_stages_own_values_and_what_is_documented_pass() -> None:
    text = (ROOT / "serverless.yml").read_text()
    for stage in ("dev", "prod", "of-my-own"):
        assert list(lambda_parameters.problems(stage, (), text)) == []
        assert list(lambda_parameters.problems(stage, (*EVERYTHING, "metricsNamespace=off"), text)) == []
    assert lambda_parameters.declared("prod", text)["logRetentionDays"] == "90"
    assert lambda_parameters.declared("dev", text)["secret"] == "dlqbatch/dev"
    assert set(lambda_parameters.CHECKS) <= set(lambda_parameters.declared("dev", text))


def test_a_package_that_fails_leaves_the_one_before(packages: Path) -> None:
    def made() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (packages / "prod").iterdir()}

    before = made()
    done = packaging("--output", str(packages), "--stage", "prod", "--unheard-of")
    assert done.returncode not in (0, 2)
    assert "--unheard-of" in done.stderr
    assert made() == before
    assert list(packages.glob(".prod.*")) == []


def test_the_command_that_deploys_works_in_any_folder(packages: Path) -> None:
    (line,) = [line for line in (packages / "said").read_text().splitlines() if line.startswith("  cd ")]
    change, folder, and_then, *command = shlex.split(line)
    assert (change, Path(folder), and_then) == ("cd", ROOT, "&&")
    assert Path(command[0]).is_absolute()
    assert command[1:4] == ["deploy", "--package", str(packages / "prod")]
    assert "--param=broker=orders-mq" in command


def test_the_unpacked_package_holds_all_that_a_function_loads(task: Path) -> None:
    found = as_lambda(
        task,
        "".join(f"import dlqbatch.{job}.job\n" for job in JOBS)
        + "import json, boto3, handler, pika, psycopg, sqlalchemy, apscheduler\n"
        "for service in ('secretsmanager', 'sns', 's3'): boto3.client(service, region_name='eu-central-1')\n"
        "print(json.dumps([m.__file__ for m in (boto3, handler, pika, psycopg, sqlalchemy, apscheduler)]))",
    )
    assert {Path(file).is_relative_to(task) for file in found} == {True}
