from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
REQUIREMENTS = {"requirements.txt", *(f"requirements-{extra}.txt" for extra in ("aws", "console", "otlp"))}
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


def test_the_scheduler_waits_for_the_servers_the_schema_and_the_queues() -> None:
    waits = {other: condition for name, other, condition in dependencies() if name == "dlqbatch"}
    assert waits == {
        "rabbitmq": "service_healthy",
        "postgres": "service_healthy",
        "migrate": "service_completed_successfully",
        "topology": "service_completed_successfully",
    }
    for name in ("migrate", "topology"):
        assert "restart" not in SERVICES[name], f"{name} would never be completed"


def test_ports_are_published_on_loopback_only() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports
    for port in ports:
        assert re.fullmatch(r"127\.0\.0\.1:\$\{[A-Z0-9_]+-\d+\}:\d+", port)
    outside = [port.rpartition("}")[0] for port in ports]
    assert len(set(outside)) == len(outside), "two services on one port"


def test_every_volume_is_named_and_declared() -> None:
    volumes = {volume.partition(":")[0] for service in SERVICES.values() for volume in service.get("volumes", [])}
    assert volumes == set(COMPOSE["volumes"])


def test_every_password_can_be_set_from_outside() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    outside = re.sub(r"\$\{(RABBITMQ|POSTGRES)_(USER|PASSWORD|ERLANG_COOKIE):-[^}]*\}", "", text)
    assert "dlqbatch-dev" not in outside


def test_the_cluster_and_the_console_start_only_when_asked_for() -> None:
    named = {name: service["profiles"] for name, service in SERVICES.items() if "profiles" in service}
    assert named == {f"cluster-{number}": ["cluster"] for number in (1, 2, 3)} | {"console": ["console"]}


def test_the_nodes_of_the_cluster_look_for_each_other_and_share_all_but_their_names_and_places() -> None:
    nodes = {name: service for name, service in SERVICES.items() if service.get("profiles") == ["cluster"]}
    (mount,) = {str(config) for node in nodes.values() for config in node["configs"]}
    assert "/etc/rabbitmq/conf.d/" in mount
    looked_for = re.findall(r"nodes\.\d = rabbit@(\S+)", COMPOSE["configs"]["cluster-peers"]["content"])
    assert sorted(looked_for) == sorted(nodes) == sorted(node["hostname"] for node in nodes.values())
    own = {"hostname", "ports", "volumes"}
    shared = [{key: value for key, value in node.items() if key not in own} for node in nodes.values()]
    assert shared[0] == shared[1] == shared[2]
    assert "RABBITMQ_ERLANG_COOKIE" in shared[0]["environment"]
    assert shared[0]["image"] == SERVICES["rabbitmq"]["image"]
    assert len({volume for node in nodes.values() for volume in node["volumes"]}) == len(nodes)


def test_the_addresses_in_the_settings_name_services() -> None:
    settings = SERVICES["dlqbatch"]["environment"]
    urls = [re.sub(r"\$\{[^}]*\}", "x", value) for value in settings.values() if "://" in value]
    assert {url.partition("@")[2].partition(":")[0] for url in urls} == {"rabbitmq", "postgres"}


def test_the_image_copies_files_that_exist_and_that_its_context_lets_in() -> None:
    copied = [
        source
        for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, flags=re.MULTILINE)
        for source in line.split()[:-1]
    ]
    assert set(copied) == {*REQUIREMENTS, "handler.py", "application.properties", "dlqbatch"}
    admitted = set(re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), flags=re.MULTILINE))
    assert admitted == set(copied)
    assert [source for source in copied if not (ROOT / source).exists()] == []


def test_the_console_s_image_is_the_same_with_another_extra() -> None:
    extras = SERVICES["console"]["build"]["args"]["EXTRAS"].split()
    (default,) = re.findall(r"^ARG EXTRAS=(.*)$", DOCKERFILE, flags=re.MULTILINE)
    assert extras == [default, "console"]
    assert {f"requirements-{extra}.txt" for extra in extras} < REQUIREMENTS


def test_the_image_has_two_stages_on_one_pinned_base_and_runs_as_an_ordinary_user() -> None:
    bases = re.findall(r"^FROM (\S+)", DOCKERFILE, flags=re.MULTILINE)
    assert len(bases) == 2
    assert len(set(bases)) == 1
    assert re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+", bases[0])
    user = re.findall(r"^USER (\S+)", DOCKERFILE, flags=re.MULTILINE)[-1]
    assert int(user) > 0
    assert f"--uid {user} " in DOCKERFILE


def test_requirements_pin_every_package_once() -> None:
    lines = [
        line
        for name in ("requirements.txt", "requirements-aws.txt", "requirements-dev.txt")
        for line in (ROOT / name).read_text().splitlines()
        if line and not line.startswith(("#", "-r "))
    ]
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    names = [re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in lines]
    assert len(names) == len(set(names))
