"""Every queue of ours says its type, so that no default of the virtual host decides what becomes of messages."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from limited_users import load
from program import DLQ, HANGS_AFTER, RETRY_QUEUE, Client, Program, client, eventually
from slow_link import SlowLink

from dlqbatch.topology.declare import apply_topology
from scripts.servers.management import Management, quoted
from scripts.servers.rabbitmq import RabbitNode

if TYPE_CHECKING:
    from pathlib import Path

MESSAGES = 1_500
EVERY_KIND = (
    "dlqbatch.topology.checkout.kind=per-queue",
    "dlqbatch.topology.checkout.queue=checkout",
    "dlqbatch.topology.checkout.exchange=shop",
    "dlqbatch.topology.step.kind=pipeline",
    "dlqbatch.topology.step.exchange=settlement.requested",
    "dlqbatch.topology.step.queue=settlements",
)


def of_quorum_by_default(management: Management) -> None:
    management.put(f"vhosts/{quoted(management.vhost)}", {"default_queue_type": "quorum"})


def written(folder: Path, *lines: str) -> str:
    config = folder / "application.properties"
    config.write_text("\n".join(lines))
    return str(config)


def types(management: Management) -> dict[str, str]:
    return {queue["name"]: queue["arguments"].get("x-queue-type", queue["type"]) for queue in management.queues()}


def test_where_quorum_is_the_default_the_settings_decide(
    broker43_url: str, management43: Management, sqlite_url: str, tmp_path: Path
) -> None:
    of_quorum_by_default(management43)
    program = Program({"broker_url": broker43_url, "database_url": sqlite_url})
    program = program.but(config=written(tmp_path, *EVERY_KIND, "dlqbatch.events.a=1"))
    done = program.run("topology", "apply", "--demonstration")
    assert done.code == 0, done.said
    assert set(types(management43).values()) == {"classic"}
    assert len(types(management43)) > 15
    assert program.run("topology", "plan").code == 0
    exported = json.loads(program.run("topology", "export").out)
    assert {queue["arguments"]["x-queue-type"] for queue in exported["queues"]} == {"classic"}


@pytest.mark.usefixtures("on_every_broker")
def test_a_queue_of_another_type_than_the_settings_say_ends_the_run_before_a_message_moves(
    program: Program, team: Client, management: Management
) -> None:
    team.channel.queue_delete(RETRY_QUEUE)
    team.channel.queue_declare(RETRY_QUEUE, durable=True, arguments={"x-queue-type": "quorum"})
    team.make_origin("orders-queue")
    team.channel.queue_bind(RETRY_QUEUE, "retry-exchange", "retry-routing-key")
    team.fail("orders-queue", "orders.created", b"stays")
    done = program.run("drain")
    assert done.code == 2, done.said
    assert f"'{RETRY_QUEUE}' differs from the settings: x-queue-type is quorum" in done.err
    # Who may not declare is told the same: by the management API, and where that is silent by a question.
    name = f"user-{management.vhost}"
    management.put(f"users/{name}", {"password": "p", "tags": "management"})
    try:
        management.put(
            f"permissions/{quoted(management.vhost)}/{name}", {"configure": "^$", "write": ".*", "read": ".*"}
        )
        host, port = management._address
        login = program.but(broker_url=program.settings["broker_url"].replace("guest:guest", f"{name}:p"))
        for api in (f"http://{host}:{port}", "http://127.0.0.1:9"):
            done = login.but(management_url=api).run("drain")
            assert (done.code, "x-queue-type is quorum" in done.err) == (2, True), done.said
    finally:
        management.delete(f"users/{name}")
    assert team.depth(RETRY_QUEUE) == 1


@pytest.mark.usefixtures("on_every_broker")
@pytest.mark.parametrize(("job", "queue"), [("drain", RETRY_QUEUE), ("ingest", DLQ)])
def test_a_dry_run_says_whether_its_look_was_a_delivery(broker_url: str, sqlite_url: str, job: str, queue: str) -> None:
    program = Program({"broker_url": broker_url, "database_url": sqlite_url, "queue_type": "quorum"})
    for arguments in (("db", "upgrade"), ("events", "set", "#", "3"), ("topology", "apply")):
        assert program.run(*arguments).code == 0
    with client(broker_url) as team:
        team.publish("", queue, headers={})
        done = program.run(job, "--dry-run", "--json")
        assert json.loads(done.out)["counts"]["got"] == 1, done.said
        found = None
        while found is None:
            found = team.channel.basic_get(queue)[1]
        costs = any(
            "this look cost each message one delivery" in line for line in json.loads(done.out).get("warnings", ())
        )
        assert costs == bool(found.headers.get("x-delivery-count"))


@pytest.mark.parametrize(("job", "queue"), [("drain", RETRY_QUEUE), ("ingest", DLQ)])
def test_what_delayed_retry_hides_is_not_seen_empty(
    broker43_url: str, management43: Management, sqlite_url: str, job: str, queue: str
) -> None:
    host, port = management43._address
    program = Program({"broker_url": broker43_url, "database_url": sqlite_url, "queue_type": "quorum"})
    program = program.but(management_url=f"http://{host}:{port}")
    for arguments in (("db", "upgrade"), ("events", "set", "#", "3"), ("topology", "apply")):
        assert program.run(*arguments).code == 0
    delays = {"delayed-retry-type": "all", "delayed-retry-min": 600_000}
    policy = {"pattern": ".*", "definition": delays, "apply-to": "quorum_queues"}
    management43.put(f"policies/{quoted(management43.vhost)}/delays", policy)

    def is_hidden() -> bool:
        """Put back as a run does it; the policy takes a moment."""
        method, _, _ = team.channel.basic_get(queue)
        if method is not None:
            team.channel.basic_nack(method.delivery_tag, requeue=True)
        return management43.queue(queue).get("messages_delayed") == 1

    with client(broker43_url) as team:
        team.publish("", queue)
        assert eventually(is_hidden)
        done = program.run(job, "--json")
    assert (done.code, done.told["outcome"], done.told["stopped_by"]) == (3, "partial", "failure"), done.said
    (warning,) = done.told["warnings"]
    assert f"'{queue}' was not read to its end: delayed retry hides 1 message(s)" in warning


@pytest.mark.slow
def test_messages_that_were_delivered_often_survive_a_drain_that_is_killed(
    broker43_url: str, management43: Management, sqlite_url: str
) -> None:
    """A quorum queue deletes after 20 deliveries what has no dead-letter exchange; a killed reader counts as one."""
    of_quorum_by_default(management43)
    program = Program({"broker_url": broker43_url, "database_url": sqlite_url, "tier_ttls": "1h,1h,1h"})
    assert program.run("db", "upgrade").code == 0
    assert program.run("events", "set", "orders.*", "3").code == 0
    apply_topology(load(dict(program.settings)))
    with client(broker43_url) as team:
        team.make_origin("orders-queue")
        for number in range(MESSAGES):
            team.publish("orders", "orders.created", b"%06d" % number)
        deliver_until_the_limit(broker43_url, team)
        team.await_depth(RETRY_QUEUE, MESSAGES)
        for _ in range(3):
            with SlowLink(broker43_url, pause_after=60_000) as link:
                run = program.but(broker_url=link.url).start("drain", "--json")
                assert link.paused.wait(HANGS_AFTER)
                run.kill()
                run.wait(HANGS_AFTER)
                link.hang_up()
            assert eventually(lambda: not consumed(management43)), "the broker has not noticed"
        found = {message.body for queue in (RETRY_QUEUE, "queue.delay.1") for message in team.contents(queue)}
    assert found == {b"%06d" % number for number in range(MESSAGES)}


def deliver_until_the_limit(url: str, team: Client) -> None:
    """A consumer whose channel goes again and again, until the queue gives every message up."""
    for _ in range(21):
        with client(url) as worker:
            channel = worker.channel
            seen: list[Any] = []
            channel.basic_consume("orders-queue", lambda *_, seen=seen: seen.append(None))
            while len(seen) < MESSAGES and team.depth(RETRY_QUEUE) == 0:
                channel.connection.process_data_events(0.05)


def consumed(management: Management) -> bool:
    return any(one["user_provided_name"] == "dlqbatch drain" for one in connections(management))


def connections(management: Management) -> list[dict[str, Any]]:
    found = management.get(f"vhosts/{quoted(management.vhost)}/connections")
    return [{"user_provided_name": None, **one} for one in found]


@pytest.mark.slow
def test_runs_with_nothing_to_do_leave_no_error_in_the_brokers_log(
    work_folder: Path, sqlite_url: str, tmp_path: Path
) -> None:
    with RabbitNode(work_folder / "rabbitmq").start() as node, client(node.url) as team:
        management = Management(node.management_url)
        ladders = {
            "classic": ("dlqbatch.queue-type=classic", *EVERY_KIND),
            "quorum": ("dlqbatch.queue-type=quorum",),
        }
        program = Program({"broker_url": node.url, "management_url": node.management_url, "database_url": sqlite_url})
        assert program.run("db", "upgrade").code == 0
        for queue_type, lines in ladders.items():
            for queue in management.queues():
                management.delete(f"queues/%2F/{quoted(queue['name'])}")
            installed = program.but(config=written(tmp_path, *lines, "dlqbatch.events.orders.created=1"))
            assert installed.run("topology", "apply").code == 0
            team.make_origin("orders-queue")
            since = len(errors(node))
            for job in (("drain",), ("ingest",), ("check", DLQ, "--to", "aside"), ("check", "dlq-*", "--to", "aside")):
                done = installed.run(*job, "--json")
                assert done.code == 0, done.said
            assert errors(node)[since:] == [], queue_type
            team.fail("orders-queue", "orders.created", b"1")
            assert installed.run("drain", "--json").told["counts"]["delayed"] == 1
            assert errors(node)[since:] == [], queue_type


def errors(node: RabbitNode) -> list[str]:
    return [line for line in node.log.read_text().splitlines() if "[error]" in line]
