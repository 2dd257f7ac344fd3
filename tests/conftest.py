"""Real servers for the tests: those that `scripts/test` started, else private ones of this session's own.

What is asked for decides what starts. A server that is not installed fails the tests that need it; none is skipped.

broker_url    an AMQP address of a new, empty virtual host (user guest), deleted afterwards
management    the HTTP API of that virtual host: read topology back, make users and policies
database_url  a new, empty PostgreSQL database, dropped afterwards
sqlite_url    an SQLite file that does not exist yet
work_folder   a short path that every user can walk to, for servers that a test starts itself
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

import psycopg
import pytest

from scripts import services
from scripts.servers.management import Management
from scripts.servers.postgres import PostgresCluster
from scripts.servers.rabbitmq import RabbitNode
from scripts.servers.server import ServiceError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def work_folder() -> Iterator[Path]:
    with services.work_folder() as folder:
        yield folder


@pytest.fixture(scope="session")
def broker_addresses() -> Iterator[tuple[str, str]]:
    """The AMQP address without a virtual host, and the address of the HTTP API."""
    url, api = os.environ.get("DLQBATCH_TEST_BROKER_URL"), os.environ.get("DLQBATCH_TEST_MANAGEMENT_URL")
    if url and api:
        yield url.rpartition("/")[0], api
        return
    with services.work_folder() as folder:
        try:
            node = RabbitNode(folder / "rabbitmq").start()
        except ServiceError as error:
            pytest.fail(str(error), pytrace=False)
        with node:
            yield node.url.rpartition("/")[0], node.management_url


@pytest.fixture
def management(broker_addresses: tuple[str, str]) -> Iterator[Management]:
    client = Management(broker_addresses[1], vhost=f"test-{secrets.token_hex(6)}")
    client.make_vhost()
    try:
        yield client
    finally:
        client.drop_vhost()


@pytest.fixture
def broker_url(broker_addresses: tuple[str, str], management: Management) -> str:
    return f"{broker_addresses[0]}/{management.vhost}"


@pytest.fixture(scope="session")
def database_server() -> Iterator[str]:
    """The address of the maintenance database, as psycopg spells it."""
    url = os.environ.get("DLQBATCH_TEST_DATABASE_URL")
    if url:
        yield url.replace("+psycopg", "")
        return
    with services.work_folder() as folder:
        try:
            cluster = PostgresCluster(folder / "postgres").start()
        except ServiceError as error:
            pytest.fail(str(error), pytrace=False)
        with cluster:
            yield cluster.url.replace("+psycopg", "")


@pytest.fixture
def database_url(database_server: str) -> Iterator[str]:
    name = f"test_{secrets.token_hex(6)}"
    with psycopg.connect(database_server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
        yield database_server.replace("postgresql://", "postgresql+psycopg://").rpartition("/")[0] + "/" + name
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'dlqbatch.sqlite3'}"
