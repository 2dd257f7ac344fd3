"""No secret is in anything that any command or job says, shows, stores or sends, whether it succeeds or fails."""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
from typing import TYPE_CHECKING, NamedTuple
from urllib.request import urlopen

import boto3
import psycopg
import pytest
from every_command import ALONE, Said, Step, every_command, everything, run_all
from planted_secrets import ENCODED, PLAIN, SECRET, WORD, leaks, shown_of
from program import HANDLER, HANGS_AFTER, Client, client, environment, eventually
from webhook_receiver import OK, Hook, hook

from dlqbatch.store import migrate
from scripts import services
from scripts.servers.management import quoted
from scripts.servers.postgres import PostgresCluster
from scripts.servers.server import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from scripts.servers.management import Management

ORIGIN = "orders-queue"
EVERYTHING = {"configure": ".*", "write": ".*", "read": ".*"}


def test_a_secret_is_found_in_every_form_in_which_it_could_leak() -> None:
    import base64  # noqa: PLC0415
    import gzip  # noqa: PLC0415

    login = f"app:{SECRET}".encode()
    for text in (
        SECRET,
        ENCODED,
        repr(SECRET),
        json.dumps({"x": SECRET}),
        WORD.upper(),
        base64.b64encode(login),
        base64.b64encode(b"\0app\0" + SECRET.encode()),
        base64.b64encode(b"1" + login),
        gzip.compress(login),
        login.hex(),
    ):
        assert leaks(text), text
    assert not leaks(b"nothing of it")


class World(NamedTuple):
    settings: dict[str, str]
    variables: dict[str, str]
    team: Client
    database: str
    """The address for whoever is let in without a password."""
    hook: Hook
    folder: Path


@pytest.fixture(scope="module")
def locked_server() -> Iterator[str]:
    """A PostgreSQL that asks the role `app` for its password."""
    with services.work_folder(volatile=True) as folder, PostgresCluster(folder / "postgres").start() as cluster:
        url = cluster.url.replace("+psycopg", "")
        rules = cluster.data / "pg_hba.conf"
        rules.write_text(f"host all app 127.0.0.1/32 scram-sha-256\n{rules.read_text()}")
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(
                psycopg.sql.SQL("CREATE ROLE app LOGIN SUPERUSER PASSWORD {}").format(psycopg.sql.Literal(SECRET))
            )
            connection.execute("SELECT pg_reload_conf()")
        yield url


@pytest.fixture
def world(
    broker_url: str, management: Management, locked_server: str, aws: dict[str, str], tmp_path: Path
) -> Iterator[World]:
    user, name = f"app-{secrets.token_hex(4)}", f"test_{secrets.token_hex(6)}"
    management.put(f"users/{user}", {"password": SECRET, "tags": "administrator"})
    management.put(f"permissions/{quoted(management.vhost)}/{user}", EVERYTHING)
    place = broker_url.rpartition("@")[2]
    api = "{}:{}".format(*management._address)
    with psycopg.connect(locked_server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    database = f"{locked_server.rpartition('/')[0]}/{name}"
    server = database.rpartition("@")[2]
    topic = boto3.client("sns").create_topic(Name="alerts")["TopicArn"]
    (tmp_path / "cold").mkdir()
    with hook(OK) as other, client(broker_url) as team:
        settings = {
            "broker_url": f"amqp://{user}:{ENCODED}@{place}",
            "management_url": f"http://{user}:{ENCODED}@{api}",
            "database_url": f"postgresql://app:{ENCODED}@{server}",
            "webhook_url": f"http://hook:{ENCODED}@127.0.0.1:{other.port}/services/{PLAIN}?key={PLAIN}",
            "alert_topic": topic,
            "alert_backlog": "1",
            "cold_storage": str(tmp_path / "cold"),
            "prometheus_file": str(tmp_path / "dlqbatch.prom"),
            "metrics_namespace": "dlqbatch/test",
            "tier_ttls": "50,50,50",
            "connect_timeout_seconds": "30",
            "log_level": "debug",
            "check_queues": "dlq.*",
        }
        variables = aws | {"AWS_SECRET_ACCESS_KEY": f"{PLAIN}KEY", "AWS_SESSION_TOKEN": f"{PLAIN}TOKEN"}
        yield World(settings, variables, team, database, other, tmp_path)
    with psycopg.connect(locked_server, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
    management.delete(f"users/{user}")


def assert_quiet(said: Said) -> None:
    found = leaks(said.out) + leaks(said.err)
    assert not found, b"\n\n".join(found).decode(errors="replace")


def assert_nothing_stored(world: World) -> None:
    """In no file, no table, no message to others; what the settings say where to tell it is their business."""
    for file in world.folder.rglob("*"):
        if file.is_file():
            assert not leaks(file.read_bytes()), file
            assert not leaks(str(file)), file
    with psycopg.connect(world.database) as connection:
        tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
        assert len(tables) > 10
        for (table,) in tables:
            rows = connection.execute(f"SELECT to_jsonb(t)::text FROM {table} AS t").fetchall()  # type: ignore[arg-type]
            assert not leaks("\n".join(row for (row,) in rows)), table


@pytest.mark.slow
def test_no_command_that_does_its_work_shows_stores_or_sends_a_secret(world: World) -> None:
    (world.folder / "body").write_text("another body")
    settings = world.settings
    steps = everything(world.folder)
    first = [step.call for step in steps].index(("drain", "--dry-run"))
    before = run_all(steps[:first], settings, world.variables, world.folder)
    assert_quiet(before)
    world.team.make_origin(ORIGIN)
    world.team.fail(ORIGIN, "orders.created", *(b"body %d" % number for number in range(4)))
    after_ingest = [step.call for step in steps].index(("lifecycle",))
    said = run_all(steps[first:after_ingest], settings, world.variables, world.folder)
    assert_quiet(said)
    with psycopg.connect(world.database) as connection:
        assert connection.execute("SELECT count(*) FROM dlq_messages").fetchone() == (4,)
        # Old enough for the cold.
        connection.execute(
            "UPDATE dlq_messages SET status = 'failed', status_since = now() - interval '1 year' WHERE id > 2"
        )
    said = run_all(steps[after_ingest:], settings, world.variables, world.folder)
    assert_quiet(said)
    codes = dict(zip(map(str, [step.call for step in steps]), before.codes + ["-"] * 99, strict=False))
    assert "1" not in before.codes, codes
    assert_nothing_stored(world)
    assert any(world.folder.joinpath("cold").rglob("*.gz"))
    assert world.hook.requests
    for request in world.hook.requests:
        assert not leaks(request.partition(b"\r\n\r\n")[2])
    called = {step.call[: len(path)] for step in steps if isinstance(step.call, tuple) for path in every_command()}
    assert every_command() - called == ALONE


JOBS = ("drain", "ingest", "check", "lifecycle", "monitor", "retain")
OTHERS = (
    "doctor",
    "status",
    "messages list",
    "replay plan --all --reason r",
    "archive list",
    "topology plan",
    "db upgrade",
)


def failing(world: World) -> Iterator[Step]:
    """Every way to fail, for every job; and what a command shares with no job."""
    user, place = world.settings["broker_url"].split("//")[1].split(":")[0], "127.0.0.1:1/x"
    wrong = ENCODED.replace("-b", "-wrong")
    own = world.settings["broker_url"].rpartition("@")[2]
    database = world.settings["database_url"].rpartition("@")[2]
    (world.folder / "bad.properties").write_text(
        f"dlqbatch.broker-url=amqp://u:{SECRET}@h/\ndlqbatch.password={PLAIN}\ndlqbatch.{PLAIN[6:]}=x\n"
        f"dlqbatch.database-url=\\u12 {SECRET}\ndlqbatch.webhook-url={SECRET}\ndlqbatch.max-messages=x://{SECRET}\n"
    )
    every = {
        "broker down": {"broker_url": f"amqp://u:{ENCODED}@{place}", "connect_timeout_seconds": "0.1"},
        "one of two": {"broker_url": f"amqp://u:{ENCODED}@{place},amqp://v:{ENCODED}@{place}"},
        "database down": {"database_url": f"postgresql://u:{ENCODED}@127.0.0.1:1/x", "connect_timeout_seconds": "0.5"},
        "database login": {"database_url": f"postgresql://app:{wrong}@{database}"},
        "database option": {"database_url": f"postgresql://app@{database}?password={ENCODED}x"},
        "database unknown option": {"database_url": f"postgresql://app:{ENCODED}@{database}?passfile=/x&{PLAIN}=1"},
        "bad broker": {"broker_url": f"amqp://u:{SECRET}@h/"},
        "bad database": {"database_url": f"postgresql://u:{SECRET}@h/x"},
        "bad scheme": {"broker_url": f"http://u:{PLAIN}@h/", "database_url": f"mysql://u:{PLAIN}@h/x"},
        "no address": {"broker_url": SECRET, "database_url": SECRET, "webhook_url": SECRET, "management_url": SECRET},
        "wrong place": {"max_messages": f"amqp://u:{SECRET}@h/", "queue_type": f"x@{PLAIN}"},
        "file": {"config": str(world.folder / "bad.properties")},
        "api": {"management_url": f"http://u:{wrong}@{world.settings['management_url'].rpartition('@')[2]}"},
        "api down": {"management_url": f"https://u:{ENCODED}@127.0.0.1:1"},
        "hook": {"webhook_url": f"https://u:{ENCODED}@127.0.0.1:1/{PLAIN}?{PLAIN}"},
    }
    commands = [*JOBS, *OTHERS]
    for turn, settings in enumerate(every.values()):
        # Turn by turn: what a way to fail says is said in one place for all of them, and each command fails in some.
        for command in dict.fromkeys(["drain", *(commands[(turn * 4 + each) % len(commands)] for each in range(4))]):
            yield Step(tuple(command.split()), {"connect_timeout_seconds": "0.2"} | settings)
        yield Step({"job": JOBS[turn % len(JOBS)]}, {"connect_timeout_seconds": "0.2"} | settings)
    for command in ("drain", "doctor"):
        yield Step((command,), {"broker_url": f"amqp://{user}:{wrong}@{own}"})
        yield Step((command,), {"broker_url": f"amqp://{user}:{ENCODED}@{own}-{PLAIN[6:]}"})
    for given in (f"broker_url=amqp://u:{SECRET}@h", f"nothing={SECRET}", SECRET, f"topology.x.kind={SECRET}"):
        yield Step(("drain", "-s", given))
    yield Step({"job": "drain", "broker_url": f"amqp://u:{SECRET}@h"})
    yield Step({"job": f"amqp://u:{SECRET}@h"})
    for text in (f"could not reach amqp://u:{SECRET}@h/v", f"bad login password={PLAIN} for u", SECRET, ENCODED):
        yield Step(("drain", "--json"), {}, text)
        yield Step({"job": "drain"}, {}, text)


@pytest.mark.slow
def test_no_command_that_fails_shows_or_stores_a_secret(world: World) -> None:
    migrate.upgrade(world.database)
    steps = list(failing(world))
    said = run_all(steps, world.settings, world.variables, world.folder)
    (world.folder / "bad.properties").unlink()
    assert_quiet(said)
    assert_nothing_stored(world)
    # They did fail, most of them; and none of a reason that nobody thought of, but for those that are meant to.
    assert sum(code in {"1", "2", "3", "4"} for code in said.codes) > len(steps) / 2
    meant = sum(bool(step.breaks) for step in steps)
    assert said.err.count(b"unexpected error") <= 3 * meant


def test_neither_the_scheduler_nor_its_runs_show_a_secret_to_other_users(world: World) -> None:
    import subprocess  # noqa: PLC0415

    migrate.upgrade(world.database)
    port = free_port()
    settings = world.settings | {
        "health_address": f"127.0.0.1:{port}",
        "schedule_drain": "1s",
        "schedule_monitor": "1s",
    }
    process = subprocess.Popen(
        [sys.executable, HANDLER, "schedule", "--json"],
        env=environment(**settings) | world.variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    seen = b""
    pages = b""
    try:

        def is_done() -> bool:
            nonlocal seen, pages
            seen += shown_of(process.pid)
            with contextlib.suppress(OSError):
                for page in ("healthz", "metrics"):
                    with urlopen(f"http://127.0.0.1:{port}/{page}", timeout=HANGS_AFTER) as answer:
                        pages += answer.read()
            return b'"last_exit_code": 0' in pages and seen.count(b"schedule/child.py") > 1

        assert eventually(is_done)
    finally:
        process.terminate()
        out, err = process.communicate(timeout=HANGS_AFTER)
    for text in (seen, pages, out, err):
        assert not leaks(text), leaks(text)
    assert b"dlqbatch_" in pages


def test_the_demo_shows_no_secret(world: World) -> None:
    steps = [Step(("demo",)), Step(("demo", "--json"), {"broker_url": f"amqp://u:{ENCODED}@127.0.0.1:1/x"})]
    said = run_all(steps, world.settings | {"log_format": "text"}, world.variables, world.folder)
    assert_quiet(said)
    assert said.codes == ["0", "4"]
    assert b"queues named demo-" in said.out


def test_a_secret_that_comes_from_the_secrets_manager_is_not_shown_either(world: World) -> None:
    store = boto3.client("secretsmanager")
    addresses = {"broker_url", "database_url", "management_url", "webhook_url"}
    held = {name: value for name, value in world.settings.items() if name in addresses}
    bad = dict.fromkeys(addresses, f"x{SECRET}") | {"password": SECRET, PLAIN[6:]: SECRET}
    for name, text in {
        "good": json.dumps(held),
        "bad": json.dumps(bad),
        "none": SECRET,
        "list": f'["{SECRET}"]',
    }.items():
        store.create_secret(Name=f"dlqbatch/{name}", SecretString=text)
    others = {name: value for name, value in world.settings.items() if name not in addresses}
    migrate.upgrade(world.database)
    steps = [Step(("drain", "--allow-empty-policy"), {"secret": "dlqbatch/good"})]
    for name in ("bad", "none", "list", "missing"):
        steps += [
            Step(("monitor",), {"secret": f"dlqbatch/{name}"}),
            Step({"job": "drain"}, {"secret": f"dlqbatch/{name}"}),
        ]
    said = run_all(steps, others | {"log_format": "text"}, world.variables, world.folder)
    assert_quiet(said)
    assert said.codes[0] == "0"
