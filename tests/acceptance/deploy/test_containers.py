"""The Dockerfile and docker-compose.yml without an engine: their schema, what they refer to, and what runs inside."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import jsonschema
import pytest
import yaml
from program import HANGS_AFTER, ROOT, eventually
from published_schemas import compose_schema

from dlqbatch import settings
from scripts.servers.server import free_port

if TYPE_CHECKING:
    from scripts.servers.management import Management

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PROGRAMS = {name: service for name, service in SERVICES.items() if "build" in service}
DOCKERFILE = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text())
INSTRUCTIONS = re.findall(r"^([A-Z]+) (.+)$", DOCKERFILE, flags=re.MULTILINE)
FOLDERS = ("/venv", "/requirements", "/app")
PORT = "8421"


def interpolated(text: str) -> str:
    """As Compose does it when no variable is set."""
    return re.sub(r"\$\{[A-Z_]+:?-([^}]*)\}", r"\1", text)


def test_the_compose_file_is_what_compose_understands() -> None:
    schema = compose_schema()
    validator = jsonschema.validators.validator_for(schema)(schema)
    assert [f"{list(error.path)}: {error.message}" for error in validator.iter_errors(COMPOSE)] == []
    broken = COMPOSE | {"services": {"one": {"imago": "x"}}}
    assert list(validator.iter_errors(broken)), "a schema that finds nothing proves nothing"


def test_every_variable_is_a_setting_and_every_address_a_good_one() -> None:
    assert set(PROGRAMS) == {"migrate", "topology", "dlqbatch", "console"}
    for service in PROGRAMS.values():
        variables = {name: interpolated(value) for name, value in service["environment"].items()}
        loaded = settings.load({}, variables | {"DLQBATCH_CONFIG": "/dev/null"})
        assert not loaded.warnings
        assert loaded.database_url is not None


def test_the_scheduler_s_port_is_one_everywhere_and_reachable_from_this_machine_only() -> None:
    service = SERVICES["dlqbatch"]
    assert service["environment"]["DLQBATCH_HEALTH_ADDRESS"] == f"0.0.0.0:{PORT}"
    assert service["ports"] == [f"127.0.0.1:${{HEALTH_PORT-{PORT}}}:{PORT}"]
    assert f'"127.0.0.1", {PORT},' in service["healthcheck"]["test"][-1]


def test_the_programs_may_do_as_little_in_a_container_as_on_kubernetes() -> None:
    for name, service in PROGRAMS.items():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["tmpfs"] == ["/tmp"]
        assert service["image"] == ("dlqbatch-console" if name == "console" else "dlqbatch")


def test_a_scheduler_that_is_stopped_has_the_time_to_settle() -> None:
    defaults = settings.load({}, {"DLQBATCH_CONFIG": "/dev/null"})
    bound = defaults.connect_timeout_seconds + defaults.max_seconds + defaults.settle_seconds
    assert int(SERVICES["dlqbatch"]["stop_grace_period"].removesuffix("s")) > bound


@dataclass(frozen=True, slots=True)
class Image:
    """The Dockerfile's second stage as a folder, made by its own instructions with that folder before every path."""

    root: Path
    variables: dict[str, str]
    entrypoint: list[str]

    def inside(self, text: str) -> str:
        return re.sub(rf"(?<![\w.])(?={'|'.join(FOLDERS)})", str(self.root), text)

    def start(self, *command: str, entrypoint: bool = True, **variables: str) -> subprocess.Popen[str]:
        """Without root's power to write everywhere, as in a container; what starts is found on the image's own PATH."""
        own = self.variables | {"HOME": str(self.root / "app"), "TMPDIR": str(self.root / "tmp")} | variables
        words = [*(self.entrypoint if entrypoint else ()), *command]
        found = shutil.which(words[0], path=own["PATH"])
        assert found, f"{words[0]} is not in the image"
        powerless = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
        return subprocess.Popen(
            [*powerless, found, *words[1:]],
            env=own,
            cwd=self.root / "app",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *command: str, entrypoint: bool = True, **variables: str) -> tuple[int, str]:
        with self.start(*command, entrypoint=entrypoint, **variables) as process:
            said, _ = process.communicate(timeout=HANGS_AFTER)
            return process.returncode, said


def built(root: Path, **arguments: str) -> Image:
    """Every instruction is carried out, but for what changes the machine: its users and its pip."""
    image = Image(root, {"PATH": ""}, json.loads(value_of("ENTRYPOINT")))
    for name in ("app", "tmp"):
        (root / name).mkdir()
    (root / "tmp").chmod(0o1777)
    machine = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONWARNINGS": ""}
    place = root
    for word, rest in INSTRUCTIONS:
        if word == "FROM":
            place = root
        elif word == "ARG":
            name, _, default = rest.partition("=")
            machine[name] = arguments.get(name, default)
        elif word == "WORKDIR":
            place = root / rest.strip("/")
        elif word == "COPY" and not rest.startswith("--from"):
            *sources, target = rest.split()
            for source in sources:
                copy(ROOT / source, root if target == "/" else place / target / ("" if target != source else "."))
        elif word == "RUN" and "useradd" not in rest:
            done = subprocess.run(
                ["sh", "-c", image.inside(rest)], cwd=place, env=machine, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
        elif word == "ENV":
            given = dict(one.split("=", 1) for one in rest.split())
            path = image.inside(given.pop("PATH")).replace("$PATH", "/usr/bin:/bin")
            image.variables.update(given | {"PATH": path})
    return image


def value_of(wanted: str) -> str:
    return [rest for word, rest in INSTRUCTIONS if word == wanted][-1]


def copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    else:
        shutil.copy(source, target)


def written_in(root: Path) -> dict[Path, int]:
    return {file: file.lstat().st_mtime_ns for file in root.rglob("*")}


def packages(text: str) -> set[str]:
    pinned = re.findall(r"^([\w.-]+)==([\w.]+)$", text, flags=re.MULTILINE)
    return {f"{re.sub(r'[-_.]+', '-', name).lower()}=={version}" for name, version in pinned}


@pytest.mark.slow
@pytest.mark.timeout(1800)  # it installs what the image holds
def test_what_the_image_is_made_of_runs_every_service_as_it_stands(
    work_folder: Path, broker_url: str, database_url: str, management: Management, capsys: pytest.CaptureFixture[str]
) -> None:
    image = built(work_folder)
    # It holds what runs, exactly as pinned, and no pip.
    installed = subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(image.root / "venv/bin/python"), "freeze", "--all"],
        capture_output=True,
        text=True,
        check=True,
    )
    wanted = "".join((ROOT / name).read_text() for name in ("requirements.txt", "requirements-aws.txt"))
    assert packages(installed.stdout) == packages(wanted)
    size = sum(file.stat().st_size for file in image.root.rglob("*") if file.is_file() and not file.is_symlink())
    with capsys.disabled():
        sys.stdout.write(f"\nthe image adds {size / 1_000_000:.0f} MB to its base\n")
    assert not list((image.root / "app").rglob("test*"))

    # From here on the root is read-only, as Compose and Kubernetes make it.
    for folder in [image.root / "app", image.root / "venv"]:
        subprocess.run(["chmod", "-R", "a-w", folder], check=True)
    assert "Permission denied" in image.run("python", "-c", "open('x', 'w')", entrypoint=False)[1]
    before = written_in(image.root)

    # The migration and the topology end with 0, also when all is there already.
    port = str(free_port())
    addresses = {"DLQBATCH_BROKER_URL": broker_url, "DLQBATCH_DATABASE_URL": database_url}
    for name in ("migrate", "topology", "migrate", "topology"):
        code, said = image.run(*SERVICES[name]["command"], **addresses)
        assert code == 0, said
    assert "retry-queue" in {one["name"] for one in management.queues()}
    assert image.run("events", "set", "orders.*", "3", **addresses)[0] == 0
    # What a person types there is the command that the program's hints name.
    assert image.run("dlqbatch", "events", "test", "orders.eu", entrypoint=False, **addresses)[0] == 0
    assert image.run(*json.loads(value_of("CMD")), **addresses)[0] == 0

    # The scheduler is well as soon as it answers, and ends in order when the engine says so.
    service = SERVICES["dlqbatch"]
    address = service["environment"]["DLQBATCH_HEALTH_ADDRESS"].replace(PORT, port)
    check, *words = service["healthcheck"]["test"]
    assert check == "CMD"
    asked = [word.replace(PORT, port) for word in words]
    assert image.run(*asked, entrypoint=False)[0] != 0, "it is well although nothing runs"
    with image.start(*service["command"], **addresses, DLQBATCH_HEALTH_ADDRESS=address) as scheduler:
        try:
            assert eventually(
                lambda: image.run(*asked, entrypoint=False)[0] == 0 or scheduler.poll() is not None, seconds=60
            )
            assert scheduler.poll() is None
            scheduler.terminate()
            said, _ = scheduler.communicate(timeout=HANGS_AFTER)
        finally:
            scheduler.kill()
    assert scheduler.returncode == 0, said
    assert written_in(image.root) == before


def test_the_commands_of_the_compose_file_are_the_program_s() -> None:
    assert [service["command"] for service in PROGRAMS.values()] == [
        ["db", "upgrade"],
        ["topology", "apply"],
        ["schedule"],
        ["console"],
    ]
    assert shlex.split(json.loads(value_of("ENTRYPOINT"))[-1]) == ["handler.py"]


@pytest.mark.slow
@pytest.mark.timeout(1800)  # it installs what the image holds
def test_with_the_arguments_of_the_compose_file_the_image_serves_the_console(
    work_folder: Path, database_url: str
) -> None:
    service = SERVICES["console"]
    image = built(work_folder, **service["build"]["args"])
    variables = {"DLQBATCH_DATABASE_URL": database_url, "DLQBATCH_CONSOLE_ADDRESS": "127.0.0.1:0"}
    assert image.run(*SERVICES["migrate"]["command"], **variables)[0] == 0
    with image.start(*service["command"], "--json", **variables) as console:
        try:
            assert console.stdout is not None
            line = console.stdout.readline()
            assert "Log in" in httpx2.get(f"{json.loads(line)['address']}/login").text
            console.terminate()
            said, _ = console.communicate(timeout=HANGS_AFTER)
        finally:
            console.kill()
    assert console.returncode == 0, said
