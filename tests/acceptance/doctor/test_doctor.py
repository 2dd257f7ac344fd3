"""`dlqbatch doctor` as its users have it: what it prints, how it ends, and that its fixes work when pasted."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from broker_client import Side
from program import HANDLER, HANGS_AFTER, Program

from scripts import services
from scripts.servers.management import Management, quoted
from scripts.servers.rabbitmq import RabbitNode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COMMAND = (sys.executable, HANDLER, "doctor")
BY_HAND = {"old-broker", "dead-letter-at-most-once", "nack-never-counts"}
"""What is no fault of this test's broker, and what no one command mends."""


@pytest.fixture
def settings(broker_url: str, management: Management, sqlite_url: str) -> dict[str, str]:
    host, port = management._address
    return {
        "broker_url": broker_url,
        "management_url": f"http://{host}:{port}",
        "database_url": sqlite_url,
        "log_level": "error",
    }


@pytest.fixture
def doctor(settings: dict[str, str]) -> Program:
    return Program(settings, COMMAND)


@pytest.fixture
def side(broker_url: str) -> Iterator[Side]:
    opened = Side(broker_url)
    yield opened
    opened.close()


@pytest.fixture
def sound(settings: dict[str, str]) -> None:
    """An installation in order."""
    for arguments in (("db", "upgrade"), ("events", "set", "#"), ("topology", "apply")):
        done = Program(settings).run(*arguments)
        assert done.code == 0, done.said


def test_a_sound_installation_ends_with_0(doctor: Program, sound: None) -> None:
    done = doctor.run()
    assert done.code == 0, done.said
    assert "serious " not in done.out
    assert done.err.startswith("dlqbatch: 0 serious, ")


def test_something_serious_ends_with_1_and_stands_first_with_its_fix(doctor: Program, sound: None, side: Side) -> None:
    side.queue("orders", dead_letter_exchange="gone")
    done = doctor.run()
    assert done.code == 1, done.said
    where, first, what, fix = done.out.splitlines()[:4]
    assert "virtual host 'test-" in where
    assert first == "serious  dead-letter-exchange-missing  orders"
    assert "'gone' does not exist" in what
    assert fix.startswith("    fix: curl ")
    assert "1 serious" in done.err


def test_programs_get_json(doctor: Program, sound: None, side: Side) -> None:
    side.queue("orders", dead_letter_exchange="gone")
    done = doctor.run("--json")
    assert done.code == 1
    told: Any = done.told
    assert told["counts"]["serious"] == 1
    assert told["findings"][0].keys() == {"code", "severity", "where", "what", "fix"}
    assert told["broker"]["virtual_host"].startswith("test-")
    assert "guest:guest" not in done.said


def test_a_broker_that_cannot_be_reached_ends_with_4(doctor: Program) -> None:
    done = doctor.but(broker_url="amqp://guest:s3cret@127.0.0.1:9/", connect_timeout_seconds="0.5").run("--json")
    assert done.code == 4, done.said
    assert done.told["error"]["type"] == "BrokerUnreachable"
    assert "s3cret" not in done.said


def test_a_database_that_cannot_be_reached_is_a_finding(doctor: Program, sound: None) -> None:
    closed = "postgresql://someone:s3cret@127.0.0.1:9/nowhere"
    done = doctor.but(database_url=closed, connect_timeout_seconds="2").run("--json")
    assert done.code == 1, done.said
    assert [one["code"] for one in done.told["findings"] if one["severity"] == "serious"] == ["database-unreachable"]
    assert "s3cret" not in done.said


def test_a_look_changes_nothing(doctor: Program, sound: None, side: Side, management: Management) -> None:
    side.queue("orders", dead_letter_exchange="gone")
    side.fill("dlq-queue", [b"x"])

    def state() -> Any:
        keys = ("name", "arguments", "durable")
        queues = [{key: one[key] for key in keys} for one in management.queues()]
        names = [one["name"] for one in management.exchanges()]
        return queues, names, management.bindings(), management.get(f"policies/{quoted(management.vhost)}")

    before = state()
    doctor.run()
    assert state() == before
    assert [message.redelivered for message in side.empty("dlq-queue")] == [False]


def break_things(side: Side, management: Management, *, is_new: bool) -> set[str]:
    """Queues that are wrong in every way for which there is a command; their codes."""
    lead = {"dead_letter_exchange": "", "dead_letter_routing_key": "parked"}
    side.queue("parked")
    side.queue("lost", dead_letter_exchange="gone", dead_letter_routing_key="it's lost")
    side.channel.exchange_declare("dlx", "topic", durable=True)
    side.queue("unrouted", dead_letter_exchange="dlx", dead_letter_routing_key="no.where")
    side.queue("bare", dead_letter_exchange="dlx")
    side.channel.queue_bind("bare", "amq.direct", "own.key")
    side.queue("unmade", dead_letter_exchange="", dead_letter_routing_key="not made")
    side.queue("circle-a", message_ttl=600_000, dead_letter_exchange="", dead_letter_routing_key="circle-b")
    side.queue("circle-b", message_ttl=600_000, dead_letter_exchange="", dead_letter_routing_key="circle-a")
    side.queue("self", dead_letter_exchange="")
    side.queue("work-1", **lead | {"dead_letter_routing_key": "short lived"})
    side.queue("short lived", message_ttl=600_000)
    side.queue("work-2", **lead | {"dead_letter_routing_key": "vanishing"})
    side.queue("vanishing", "quorum", expires=86_400_000, **({"delivery_limit": -1} if is_new else {}))
    side.queue("work-3", **lead | {"dead_letter_routing_key": "limited"})
    side.queue("limited", "quorum", delivery_limit=3)
    side.queue("stuck", message_ttl=600_000)
    side.queue("full", max_length=5)
    side.queue("full-said", max_length=5, overflow="drop-head")
    side.channel.queue_bind("full-said", "amq.topic", "bound.#")
    side.queue("half", "quorum", dead_letter_strategy="at-least-once", delivery_limit=5, **lead)
    definition = {"pattern": "^piled$", "definition": {"max-length": 9, "overflow": "reject-publish"}, "priority": 4}
    management.put(f"policies/{quoted(management.vhost)}/theirs", {**definition, "apply-to": "queues"})
    side.queue("work-4", **lead | {"dead_letter_routing_key": "piled"})
    side.queue("piled", message_ttl=600_000)
    side.channel.queue_delete("retry-queue-2")
    side.channel.queue_delete("retry-queue-3")
    side.queue("retry-queue-3", max_length=7, overflow="reject-publish")
    side.queue("orders", dead_letter_exchange="retry-exchange", dead_letter_routing_key="retry-routing-key")
    side.channel.queue_bind("orders", "amq.topic", "orders.created")
    side.channel.queue_bind("orders", "amq.topic", "it's.forgotten")
    return {
        *("dead-letter-exchange-missing", "dead-letter-key-unrouted", "dead-letter-cycle", "dead-letters-expire"),
        *("queue-expires", "delivery-limit-deletes", "delay-without-outlet", "overflow-drops"),
        *("at-least-once-ineffective", "topology-incomplete", "topology-differs", "ingest-queue-missing"),
        *("binding-without-event", "event-without-binding", "event-duplicate", "event-nameless", "event-negative"),
        *("event-blanks", "rule-broken"),
    }


def break_rows(sqlite_url: str) -> None:
    with contextlib.closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"))) as connection:
        connection.executescript(
            "INSERT INTO dlq_event_config VALUES (1, NULL, 3), (2, 'orders.#', 1), (3, 'orders.#', 5), (4, '-x', -1),"
            "(5, ' orders.created', NULL);"
            "INSERT INTO dlq_rules (name, position, match_on, pattern, strategy)"
            "VALUES ('-it''s broken', 900, 'any', '(', 'manual');"
        )


@pytest.mark.slow
@pytest.mark.timeout(2400)  # rabbitmqctl is started for many of the fixes
@pytest.mark.parametrize("release", ["installed", "4.3"])
def test_the_fixes_work_when_pasted_into_a_shell(
    work_folder: Path, tmp_path: Path, sqlite_url: str, release: str
) -> None:
    folder = work_folder / "node"
    with (services.node_of_43(folder) if release == "4.3" else RabbitNode(folder)).start() as node:
        settings = {
            "broker_url": node.url,
            "management_url": node.management_url.replace("guest:guest@", ""),
            "database_url": sqlite_url,
            "ingest_queues": "dlq-queue,not there",
        }
        for arguments in (("db", "upgrade"), ("topology", "apply")):
            assert Program(settings).run(*arguments).code == 0
        break_rows(sqlite_url)
        with contextlib.closing(Side(node.url)) as side:
            expected = break_things(side, Management(node.management_url), is_new=release == "4.3")
        doctor = Program(settings, COMMAND)
        programs = tmp_path / "bin"
        programs.mkdir()
        (programs / "dlqbatch").write_text(f'#!/bin/sh\nexec {sys.executable} {HANDLER} "$@"\n')
        (programs / "dlqbatch").chmod(0o755)
        ctl = node.sbin / "rabbitmqctl"
        (programs / "rabbitmqctl").write_text(f'#!/bin/sh\nexec {ctl} "$@"\n')
        (programs / "rabbitmqctl").chmod(0o755)
        environment = node.environment | {f"DLQBATCH_{name.upper()}": value for name, value in settings.items()}
        environment |= {"DLQBATCH_CONFIG": "/dev/null", "PATH": f"{programs}:{node.environment['PATH']}"}
        first = doctor.run("--json").told["findings"]
        assert expected <= {one["code"] for one in first}, first
        for _ in range(4):  # a fix may bring up what was hidden behind it
            left = [one for one in doctor.run("--json").told["findings"] if one["code"] not in BY_HAND]
            for fix in dict.fromkeys(one["fix"] for one in left):  # one command may mend several
                # curl would ask for the password.
                pasted = fix.replace(" -u guest ", " -u guest:guest ")
                done = subprocess.run(
                    ["bash", "-c", pasted],
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=4 * HANGS_AFTER,  # rabbitmqctl, several times
                    check=False,
                )
                assert done.returncode == 0, (fix, done.stdout + done.stderr)
            if not left:
                break
        assert left == []


@pytest.mark.slow
def test_the_rights_that_are_missing_are_given_when_pasted(work_folder: Path, sqlite_url: str) -> None:
    with RabbitNode(work_folder / "node").start() as node:
        api = Management(node.management_url)
        settings = {"broker_url": node.url, "management_url": node.management_url, "database_url": sqlite_url}
        for arguments in (("db", "upgrade"), ("events", "set", "#"), ("topology", "apply")):
            assert Program(settings).run(*arguments).code == 0
        api.put("users/app", {"password": "p", "tags": "management"})
        api.put("permissions/%2F/app", {"configure": "^mine$", "write": "^mine$", "read": ""})
        doctor = Program(settings | {"broker_url": node.url.replace("guest:guest@", "app:p@")}, COMMAND)
        found = doctor.run("--json").told["findings"]
        wanted = {"permission-missing", "return-permission-missing"}
        assert wanted <= {one["code"] for one in found}
        [fix] = {one["fix"] for one in found if one["code"] in wanted}
        environment = node.environment | {"PATH": f"{node.sbin}:{node.environment['PATH']}"}
        subprocess.run(["bash", "-c", fix], env=environment, check=True, capture_output=True, timeout=HANGS_AFTER)
        assert not wanted & {one["code"] for one in doctor.run("--json").told["findings"]}
        rights = api.get("permissions/%2F/app")
        assert rights["configure"] == r"^mine$|^dlqbatch\.return\..*$"
        assert rights["write"].startswith("^mine$|")
        assert ".*" not in rights["read"].replace(r"^dlqbatch\.return\..*$", "")
