"""`dlqbatch upgrade-check` as its users have it, on both brokers and both databases."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from alembic import command
from broker_client import Side
from program import Program

from dlqbatch.store import migrate
from dlqbatch.store.engine import create_engine_for, writing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from scripts.servers.management import Management

READER = "dlqbatch_reader"
"""A role of the server, which other tests may see while it is there."""


@pytest.fixture(params=["postgresql", "sqlite"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param]))


@pytest.fixture
def reached(broker_url: str, management: Management, sqlite_url: str) -> Program:
    host, port = management._address
    api = f"http://{host}:{port}"
    return Program({"broker_url": broker_url, "management_url": api, "database_url": sqlite_url, "log_level": "error"})


@pytest.fixture
def program(reached: Program, url: str) -> Program:
    return reached.but(database_url=url)


def upgrade_to(url: str, revision: str) -> None:
    with writing(create_engine_for(url, connect_timeout=30, create=True)) as connection:
        config = migrate._config()
        config.attributes["connection"] = connection
        command.upgrade(config, revision)


def steps(told: Any, of: str) -> list[Any]:
    return [step for step in told["steps"] if step["of"] == of]


def test_a_schema_that_is_behind_is_a_step_with_its_changes_and_their_cost(program: Program, url: str) -> None:
    upgrade_to(url, "0018")
    done = program.run("upgrade-check", "--json")
    assert done.code == 3, done.said
    told = done.told
    assert told["ready"] is False
    assert (told["database"]["version"], told["database"]["newest"]) == ("0018", migrate.latest())
    (step,) = steps(told, "database")
    assert (step["need"], step["fix"]) == ("to do", "dlqbatch db upgrade")
    assert step["what"].startswith(f"schema 0018 becomes {migrate.latest()} (0019: ")
    assert "; 0020: " in step["what"]
    cost = "about 0 messages" if url.startswith("postgres") else "nobody else can write to it"
    assert cost in step["what"]
    assert program.run("db", "current", "--json").told[0]["version"] == "0018", "it changes nothing"

    assert program.run("db", "upgrade").code == 0
    after = program.run("upgrade-check", "--json")
    assert steps(after.told, "database") == []


def test_a_schema_that_it_does_not_know_blocks(program: Program, url: str) -> None:
    assert program.run("db", "upgrade").code == 0
    with writing(create_engine_for(url, connect_timeout=30)) as connection:
        connection.exec_driver_sql("UPDATE dlqbatch_version SET version_num = '9999'")
    done = program.run("upgrade-check")
    assert done.code == 1, done.said
    first, kind, what, fix = done.out.splitlines()[:4]
    assert first.startswith("dlqbatch ")
    assert kind.startswith("blocked  database")
    assert "does not know" in what
    assert fix.startswith("    fix: ")


def test_it_names_what_the_next_releases_of_the_broker_change(
    on_every_broker: str, reached: Program, broker_url: str
) -> None:
    side = Side(broker_url)
    if on_every_broker == "installed":
        side.queue("orders", queue_mode="lazy")
    else:
        side.channel.exchange_declare("orders-dlx", "fanout")
        side.queue("orders", "quorum", dead_letter_exchange="orders-dlx", delivery_limit=5)
    side.close()
    done = reached.run("upgrade-check", "--json")
    found = {(step["need"], step["where"]): step["what"] for step in steps(done.told, "broker")}
    if on_every_broker == "installed":
        assert done.code == 3, done.said
        assert "RabbitMQ 4.3 refuses" in found["to do", "orders"]
        assert "gets no more fixes" in found["to do", "broker"]
    else:
        assert "basic.reject counts" in found["note", "'orders'"]
        is_ready = all(need == "note" for need, _ in found)
        assert (done.code, done.told["ready"]) == (0 if is_ready else 3, is_ready), done.said


@pytest.fixture
def reader(database_url: str) -> Iterator[str]:
    with psycopg.connect(database_url.replace("+psycopg", ""), autocommit=True) as connection:
        is_there = connection.execute("SELECT FROM pg_roles WHERE rolname = %s", (READER,)).fetchone()
        if not is_there:
            connection.execute(f"CREATE ROLE {READER} NOLOGIN")
        yield database_url
        if not is_there:
            connection.execute(f"DROP OWNED BY {READER}")
            connection.execute(f"DROP ROLE {READER}")


def test_what_the_roles_lack_is_a_step(reader: str, reached: Program) -> None:
    program = reached.but(database_url=reader)
    assert program.run("db", "upgrade").code == 0
    done = program.run("upgrade-check", "--json")
    lacking = {step["where"]: step for step in steps(done.told, "grants")}
    assert done.code == 3, done.said
    assert "SELECT on dlq_runs" in lacking[READER]["what"]
    assert lacking[READER]["fix"].startswith("dlqbatch db grants | psql")
    engine = create_engine_for(reader, connect_timeout=30)
    (grant,) = re.findall(rf"^GRANT .* TO {READER};$", migrate.grants(), re.MULTILINE)
    with writing(engine) as connection:
        connection.exec_driver_sql(grant)
    again = program.run("upgrade-check", "--json")
    assert READER not in {step["where"] for step in steps(again.told, "grants")}, again.said


def test_what_cannot_be_reached_ends_with_4_and_shows_no_password(reached: Program) -> None:
    nobody = "postgresql://someone:s3cret@127.0.0.1:9/nowhere"
    for settings in ({"database_url": nobody}, {"broker_url": "amqp://guest:s3cret@127.0.0.1:9/"}):
        done = reached.but(connect_timeout_seconds="1", **settings).run("upgrade-check")
        assert done.code == 4, done.said
        assert "s3cret" not in done.said
