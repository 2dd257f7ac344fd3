from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from client_loop import STATISTICS_DELAY, Loop
from program import HANGS_AFTER, Program, client

from dlqbatch import settings
from dlqbatch.topology.declare import apply_topology
from scripts import clients
from scripts.servers.server import ServiceError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def loop(
    request: pytest.FixtureRequest, broker_url: str, broker_release: str, sqlite_url: str, tmp_path: Path
) -> Iterator[Loop]:
    """With a ladder of short delays, and one retry for every event."""
    _, api = request.getfixturevalue("broker43_addresses" if broker_release == "4.3" else "broker_addresses")
    given = {
        "broker_url": broker_url,
        "management_url": api,
        "database_url": sqlite_url,
        "tier_ttls": "50,50,50",
        "origins_allowed": "orders",
        "statistics_delay": f"{STATISTICS_DELAY:g}s",
        "observation_window": "2s",
    }
    apply_topology(settings.load(given, {"DLQBATCH_CONFIG": "/dev/null"}))
    program = Program(given)
    for arguments in (("db", "upgrade"), ("events", "set", "#", "1")):
        done = program.run(*arguments)
        assert done.code == 0, done.said
    with client(broker_url) as team:
        running = Loop(program, team, tmp_path, broker_url)
        try:
            yield running
        finally:
            for process in running.processes:
                process.kill()
                process.wait(HANGS_AFTER)


@pytest.fixture(scope="session")
def frameworks() -> str:
    """The interpreter that has Celery and the others."""
    try:
        return clients.python()
    except ServiceError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def python_of_remoulade() -> str:
    try:
        return clients.python_of_remoulade()
    except ServiceError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def class_path() -> str:
    """Where java and javac find the broker's client."""
    try:
        return clients.class_path()
    except ServiceError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def node_modules() -> dict[str, str]:
    """The variables with which node finds amqplib and the others."""
    try:
        return {"NODE_PATH": clients.node_modules()}
    except ServiceError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def moleculers_node_modules() -> dict[str, str]:
    try:
        return {"NODE_PATH": clients.moleculers_node_modules()}
    except ServiceError as error:
        pytest.fail(str(error), pytrace=False)
