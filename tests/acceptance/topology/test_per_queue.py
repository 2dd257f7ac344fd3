"""The loop of one queue with a retry and a delay queue of its own, run by the program on a real broker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pika
import pytest
from program import DLQ, Client, Program, eventually

from dlqbatch import jobs, settings

if TYPE_CHECKING:
    from pathlib import Path

    from scripts.servers.management import Management

QUEUE, TOPIC = "checkout.created", "shop"


@pytest.fixture
def configured(program: Program, tmp_path: Path) -> Program:
    """One per-queue set beside the ladder; its event is retried ten times."""
    return with_topology(program, tmp_path)


def with_topology(program: Program, folder: Path, *lines: str, retries: int = 10) -> Program:
    config = folder / "application.properties"
    written = [
        "dlqbatch.topology.checkout.kind=per-queue",
        f"dlqbatch.topology.checkout.queue={QUEUE}",
        f"dlqbatch.topology.checkout.exchange={TOPIC}",
        "dlqbatch.topology.checkout.ttl=20ms",
        f"dlqbatch.events.{QUEUE}={retries}",
        *lines,
    ]
    config.write_text("\n".join(written))
    return program.but(config=str(config))


def drained(program: Program, *arguments: str) -> dict[str, Any]:
    done = program.run("drain", "--json", *arguments)
    assert done.code == 0, done.said
    told: dict[str, Any] = done.told
    return told


def fail(team: Client, how: str) -> None:
    """The message in QUEUE dies there, and arrives in QUEUE.retry."""
    if how == "rejected":
        assert team.reject_all(QUEUE) == 1
    team.await_depth(f"{QUEUE}.retry", 1)


@pytest.mark.slow
@pytest.mark.usefixtures("on_every_broker")
@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
@pytest.mark.parametrize("how", ["rejected", "expired"])
def test_ten_trips_through_the_delay_queue_and_then_the_dead_letters(
    program: Program, team: Client, management: Management, tmp_path: Path, how: str, queue_type: str
) -> None:
    program = with_topology(program, tmp_path, f"dlqbatch.topology.checkout.queue-type={queue_type}")
    assert program.run("topology", "apply").code == 0
    if how == "expired":
        # Whatever comes into X dies there, again and again, without a consumer.
        body = {"pattern": f"^{QUEUE}$", "definition": {"message-ttl": 1}, "apply-to": "queues"}
        management.put(f"policies/{management.vhost}/expire", body)
        assert eventually(lambda: management.queue(QUEUE).get("policy") == "expire")
    headers = {"keep": "me"}
    team.publish(TOPIC, QUEUE, b"order 1", pika.BasicProperties(headers=headers, delivery_mode=2))
    trips = 0
    while True:
        fail(team, how)
        counts = drained(program)["counts"]
        assert counts["got"] == 1
        if counts["dead_lettered"]:
            break
        assert counts["delayed"] == 1
        trips += 1
        if how == "rejected":
            team.await_depth(QUEUE, 1)
    assert trips == 10
    (dead,) = team.contents(DLQ)
    assert dead.body == b"order 1"
    assert dead.headers["keep"] == "me"
    assert dead.headers["dlqbatch-reason"] == "retries-exhausted"
    assert dead.headers["dlqbatch-retries"] == 10
    assert dead.headers["dlqbatch-origin-queue"] == QUEUE
    assert dead.headers["dlqbatch-origin-key"] == QUEUE
    for queue in (QUEUE, f"{QUEUE}.retry", f"{QUEUE}.delay"):
        assert team.depth(queue) == 0


def test_the_delay_queue_is_entered_by_no_exchange_that_others_listen_to(configured: Program, team: Client) -> None:
    assert configured.run("topology", "apply").code == 0
    team.channel.queue_declare("audit", durable=True)
    team.channel.queue_bind("audit", TOPIC, "#.delay")
    team.publish(TOPIC, QUEUE)
    fail(team, "rejected")
    assert drained(configured)["counts"]["delayed"] == 1
    team.await_depth(QUEUE, 1)
    assert team.depth("audit") == 0


def test_the_set_is_declared_by_the_first_run_and_shares_its_bound_with_the_ladder(
    configured: Program, team: Client
) -> None:
    drained(configured)
    assert team.exists(f"{QUEUE}.delay")
    team.make_origin("orders-queue")
    team.fail("orders-queue", "orders.created", *(b"%d" % number for number in range(20)))
    for number in range(20):
        team.publish(TOPIC, QUEUE, b"%d" % number)
    assert team.reject_all(QUEUE) == 20
    team.await_depth(f"{QUEUE}.retry", 20)
    assert drained(configured, "--max-messages", "10")["counts"]["delayed"] == 10
    assert (team.depth("retry-queue"), team.depth(f"{QUEUE}.retry")) == (15, 15)


def test_without_a_delay_queue_a_message_goes_straight_back(program: Program, team: Client, tmp_path: Path) -> None:
    program = with_topology(program, tmp_path, "dlqbatch.topology.checkout.delay=false", retries=1)
    program = Program({**program.settings, "ladder": "false"})
    drained(program)
    assert not team.exists(f"{QUEUE}.delay")
    team.publish(TOPIC, QUEUE, b"x")
    fail(team, "rejected")
    assert drained(program)["counts"]["returned"] == 1
    assert team.depth(QUEUE) == 1
    fail(team, "rejected")
    report = drained(program)
    assert (report["counts"]["dead_lettered"], report["reasons"]) == (1, {"retries-exhausted": 1})


def test_what_failed_in_another_queue_is_not_brought_to_this_one(configured: Program, team: Client) -> None:
    drained(configured)
    dead = {"x-dead-letter-exchange": f"{TOPIC}.retry", "x-dead-letter-routing-key": f"{QUEUE}.retry"}
    team.channel.queue_declare("stranger", durable=True, arguments=dead)
    team.publish("", "stranger", b"lost its way")
    team.reject_all("stranger")
    team.await_depth(f"{QUEUE}.retry", 1)
    assert drained(configured)["reasons"] == {"origin-unknown": 1}
    (found,) = team.contents(DLQ)
    assert "from here messages return to 'checkout.created' alone" in found.headers["dlqbatch-reason"]


def test_nothing_to_drain_is_said(program: Program) -> None:
    done = program.but(ladder="false").run("drain")
    assert done.code == 2
    assert "nothing to drain" in done.err


def test_the_queue_deleted_between_two_runs_of_one_process_is_there_before_its_messages_come_back(
    configured: Program, team: Client
) -> None:
    given = dict(configured.settings)
    loaded = settings.load(given, {"DLQBATCH_CONFIG": given.pop("config")})
    jobs.run("drain", loaded, jobs.RunOptions())
    team.publish(TOPIC, QUEUE)
    fail(team, "rejected")
    team.channel.queue_delete(QUEUE)
    assert jobs.run("drain", loaded, jobs.RunOptions()).counts["delayed"] == 1
    assert eventually(lambda: team.depth(QUEUE) == 1)
