"""A program and a schema of different versions: what the older schema lacks is said, and nothing moves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from alembic import command
from dead_rows import NOW, row
from matrix.store_jobs import Tables
from program import DLQ, Program
from rawamqp import Message, Peer
from sqlalchemy import insert, select, text

from dlqbatch.store import migrate
from dlqbatch.store.engine import create_engine_for, newest, reading, writing
from dlqbatch.store.tables import MESSAGES, UNPROVEN_RUNS

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
        for job in ("lifecycle", "retain", "monitor", "ingest", "status"):
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


def test_each_job_looks_at_the_version_and_an_older_program_goes_on(url: str, broker_url: str) -> None:
    """The tables may be there and yet be others: only the version tells."""
    migrate.upgrade(url)
    tables = Tables(url)
    program = Program({"broker_url": broker_url, "database_url": url})
    assert program.run("topology", "apply", "--yes").code == 0
    jobs = (["lifecycle"], ["retain"], ["monitor"], ["ingest"], ["status"], ["messages", "list"], ["rules", "list"])
    for version in ("0003", "9999"):
        tables.do(f"UPDATE dlqbatch_version SET version_num = '{version}'")
        for words in jobs:
            done = program.run(*words, "--json")
            if version == "9999":
                assert (done.code in (0, 1), f"are of version {version}" in done.err) == (True, True), done.said
            else:
                assert done.code == USAGE, done.said
                assert f"its tables are of version {version}" in done.err
                assert HINT in done.err
    assert newest() == migrate.latest()


def test_a_table_of_somebody_else_is_said_and_left(url: str) -> None:
    with writing(create_engine_for(url, connect_timeout=30, create=True)) as connection:
        connection.execute(text("CREATE TABLE dlq_messages (a integer)"))
    done = Program({"database_url": url}).run("db", "upgrade")
    assert (done.code, "dlqbatch did not make it" in done.err) == (USAGE, True), done.said
    with reading(create_engine_for(url, connect_timeout=30)) as connection:
        assert connection.execute(text("SELECT a FROM dlq_messages")).all() == []


def test_what_cut_runs_have_stored_before_an_upgrade_may_come_again_after_it(url: str) -> None:
    upgrade_to(url, "0002")
    engine = create_engine_for(url, connect_timeout=30)
    cut, whole = "c" * 24, "d" * 24
    since = {"status_since": NOW, "created_at": NOW, "updated_at": NOW}
    with writing(engine) as connection:
        # Only columns that these tables had: today's ingest writes those of later versions as well.
        for identity, had_id, ack_proven in (
            (f"{cut}00000000", False, False),
            (f"{cut}00000001", False, False),
            (f"{whole}00000000", False, True),
            ("orders-7", True, True),
        ):
            older = row(identity=identity, had_id=had_id, ack_proven=ack_proven) | since
            connection.execute(insert(MESSAGES).values(older))
    migrate.upgrade(url)
    with reading(engine) as connection:
        assert connection.scalars(select(UNPROVEN_RUNS.c.run)).all() == [cut]
