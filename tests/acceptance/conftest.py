"""A broker with a ladder, an origin whose consumer fails, and the program set up for them."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from program import Client, Program, client

from dlqbatch import settings
from dlqbatch.topology.declare import apply_topology

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def team(broker_url: str) -> Iterator[Client]:
    with client(broker_url) as connected:
        yield connected


@pytest.fixture(scope="session")
def policy_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file as its commands make it; two events are configured: orders.* and payment.#."""
    file = tmp_path_factory.mktemp("policy") / "dlqbatch.sqlite3"
    installed = Program({"database_url": f"sqlite:///{file}"})
    for arguments in (("db", "upgrade"), ("events", "set", "orders.*", "3"), ("events", "set", "payment.#", "0")):
        done = installed.run(*arguments)
        assert done.code == 0, done.said
    return file


@pytest.fixture
def program(broker_url: str, sqlite_url: str, policy_file: Path) -> Program:
    """With the policy of `policy_file`, and a ladder that is declared; its tiers take a moment."""
    shutil.copyfile(policy_file, sqlite_url.removeprefix("sqlite:///"))
    given = {"broker_url": broker_url, "database_url": sqlite_url, "tier_ttls": "50,50,50"}
    apply_topology(settings.load(given, {"DLQBATCH_CONFIG": "/dev/null"}))
    return Program(given)
