"""A program and a schema of different versions: what the older schema lacks is said, and nothing moves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from alembic import command
from dead_rows import add, row
from matrix.store_jobs import Tables
from program import DLQ, Program
from rawamqp import Message, Peer
from sqlalchemy import select

from dlqbatch.deadstore import migrate
from dlqbatch.deadstore.engine import create_engine_for, reading, writing
from dlqbatch.deadstore.tables import UNPROVEN_RUNS

if TYPE_CHECKING:
    from scripts.servers.management import Management

USAGE = 2
FEW = 5
HINT = "`dlqbatch db upgrade` makes"


@pytest.fixture(params=["postgresql", "sqlite"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param]))


def upgrade_to(url: str, revision: str) -> None:
    with writing(create_engine_for(url, connect_timeout=30, create=True)) as connection:
        config = migrate._config()
        config.attributes["connection"] = connection
        command.upgrade(config, revision)


def test_a_newer_program_on_an_older_schema_says_what_to_do_and_moves_nothing(
    url: str, broker_url: str, management: Management
) -> None:
    upgrade_to(url, "0002")
    tables = Tables(url)
    given: dict[str, Any] = {"broker_url": broker_url, "database_url": url, "log_level": "error"}
    program = Program(given)
    with Peer(broker_url) as peer:
        peer.queue(DLQ)
        peer.publish(Message("", DLQ.encode(), b"\0\0", b"%d" % number) for number in range(FEW))
        for job in ("lifecycle", "retain", "monitor"):
            done = program.run(job, "--json")
            assert (done.code, HINT in done.err) == (USAGE, True), done.said
        # As if this version had added a column.
        tables.do("ALTER TABLE dlq_messages DROP COLUMN possible_duplicate")
        done = program.run("ingest", "--json")
        assert (done.code, HINT in done.err) == (USAGE, True), done.said
        peer.wait_for(lambda: peer.depth(DLQ) == FEW, "what was taken to be back")
        assert tables.number("SELECT count(*) FROM dlq_messages") == 0
        tables.do("ALTER TABLE dlq_messages ADD COLUMN possible_duplicate boolean NOT NULL DEFAULT false")
        assert program.run("db", "upgrade").code == 0
        assert program.run("ingest", "--json").told["counts"]["recorded"] == FEW


def test_what_cut_runs_have_stored_before_an_upgrade_may_come_again_after_it(url: str) -> None:
    upgrade_to(url, "0002")
    engine = create_engine_for(url, connect_timeout=30)
    cut, whole = "c" * 24, "d" * 24
    add(engine, row(identity=f"{cut}00000000", had_id=False, ack_proven=False))
    add(engine, row(identity=f"{cut}00000001", had_id=False, ack_proven=False))
    add(engine, row(identity=f"{whole}00000000", had_id=False, ack_proven=True))
    add(engine, row(identity="orders-7", had_id=True, ack_proven=True))
    migrate.upgrade(url)
    with reading(engine) as connection:
        assert connection.scalars(select(UNPROVEN_RUNS.c.run)).all() == [cut]
