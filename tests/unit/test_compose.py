from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SERVERLESS: dict[str, Any] = yaml.safe_load((ROOT / "serverless.yml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()
CONDITIONS = {"service_started", "service_healthy", "service_completed_successfully"}


def dependencies() -> list[tuple[str, str, str]]:
    return [
        (name, other, how["condition"])
        for name, service in SERVICES.items()
        for other, how in service.get("depends_on", {}).items()
    ]


def test_every_service_comes_from_an_image_with_a_tag_or_from_a_dockerfile_that_exists() -> None:
    for service in SERVICES.values():
        build = service.get("build")
        if build:
            assert (ROOT / build["context"] / build["dockerfile"]).is_file()
        else:
            assert re.fullmatch(r"[a-z/]+:[\w.-]*\d[\w.-]*", service["image"])


def test_every_dependency_names_a_service_and_waits_for_something_that_it_can_give() -> None:
    assert dependencies()
    for name, other, condition in dependencies():
        assert other in SERVICES, name
        assert condition in CONDITIONS
        if condition == "service_healthy":
            assert "healthcheck" in SERVICES[other], other


def test_the_drain_waits_for_the_servers_and_for_the_migration() -> None:
    waits = {other: condition for name, other, condition in dependencies() if name == "dlqbatch"}
    assert waits == {
        "rabbitmq": "service_healthy",
        "postgres": "service_healthy",
        "migrate": "service_completed_successfully",
    }
    assert SERVICES["migrate"]["command"] == ["db", "upgrade"]


def test_ports_are_published_on_loopback_only() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports
    for port in ports:
        assert re.fullmatch(r"127\.0\.0\.1:\$\{[A-Z_]+-\d+\}:\d+", port)


def test_every_volume_is_named_and_declared() -> None:
    volumes = {volume.partition(":")[0] for service in SERVICES.values() for volume in service.get("volumes", [])}
    assert volumes == set(COMPOSE["volumes"])


def test_every_password_can_be_set_from_outside() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    outside = re.sub(r"\$\{(RABBITMQ|POSTGRES)_(USER|PASSWORD):-[^}]*\}", "", text)
    assert "dlqbatch-dev" not in outside


def test_the_addresses_in_the_settings_name_services() -> None:
    settings = SERVICES["dlqbatch"]["environment"]
    hosts = {re.sub(r"\$\{[^}]*\}", "x", url).partition("@")[2].partition(":")[0] for url in settings.values()}
    assert hosts == {"rabbitmq", "postgres"}


def test_the_image_copies_files_that_exist_and_that_its_context_lets_in() -> None:
    copied = [
        source
        for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, flags=re.MULTILINE)
        for source in line.split()[:-1]
    ]
    assert set(copied) == {"requirements.txt", "handler.py", "application.properties", "dlqbatch"}
    admitted = set(re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), flags=re.MULTILINE))
    assert admitted == set(copied)
    assert [source for source in copied if not (ROOT / source).exists()] == []


def test_the_image_has_two_stages_on_one_pinned_base_and_runs_as_an_ordinary_user() -> None:
    bases = re.findall(r"^FROM (\S+)", DOCKERFILE, flags=re.MULTILINE)
    assert len(bases) == 2
    assert len(set(bases)) == 1
    assert re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+", bases[0])
    user = re.findall(r"^USER (\S+)", DOCKERFILE, flags=re.MULTILINE)[-1]
    assert int(user) > 0


def test_every_function_on_lambda_names_a_function_of_a_file_that_is_packaged() -> None:
    included = [pattern for pattern in SERVERLESS["package"]["patterns"] if not pattern.startswith("!")]
    for function in SERVERLESS["functions"].values():
        module, _, name = function["handler"].rpartition(".")
        source = ROOT / f"{module}.py"
        assert source.name in included
        defined = {node.name for node in ast.parse(source.read_text()).body if isinstance(node, ast.FunctionDef)}
        assert name in defined


def test_the_package_for_lambda_holds_the_program_and_nothing_else() -> None:
    patterns = SERVERLESS["package"]["patterns"]
    assert patterns[0] == "!**"
    included = [pattern for pattern in patterns if not pattern.startswith("!")]
    assert included == ["handler.py", "application.properties", "dlqbatch/**", "build/lambda/**"]
    assert [one for one in included[:-1] if not list(ROOT.glob(one))] == []
    # What pip puts there is found: Lambda unpacks the package in /var/task.
    assert SERVERLESS["provider"]["environment"]["PYTHONPATH"].split(":")[0] == "/var/task/build/lambda"


def test_the_function_ends_before_the_next_one_is_due_and_runs_every_minute() -> None:
    assert SERVERLESS["provider"]["runtime"] == "python3.12"
    drain = SERVERLESS["functions"]["drain"]
    assert drain["timeout"] == 60
    assert drain["reservedConcurrency"] > 0
    assert [event["schedule"]["rate"] for event in drain["events"]] == ["rate(1 minute)"]


@pytest.mark.parametrize("name", ["DLQBATCH_BROKER_URL", "DLQBATCH_DATABASE_URL"])
def test_addresses_on_lambda_are_references_to_a_secret(name: str) -> None:
    value = SERVERLESS["provider"]["environment"][name]
    assert re.fullmatch(r"\{\{resolve:secretsmanager:\$\{param:secret\}:SecretString:\w+\}\}", value)


def test_requirements_pin_every_package_once() -> None:
    lines = [
        line
        for name in ("requirements.txt", "requirements-dev.txt")
        for line in (ROOT / name).read_text().splitlines()
        if line and not line.startswith(("#", "-r "))
    ]
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    names = [re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in lines]
    assert len(names) == len(set(names))
