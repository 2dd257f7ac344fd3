"""How far a run goes: what a dry run leaves alone, the bounds, signals, and the rights it needs."""

from __future__ import annotations

import json
import secrets
import signal
import threading
from typing import TYPE_CHECKING

import pytest
from program import DLQ, HANGS_AFTER, RETRY_QUEUE, Client, Program
from slow_link import SlowLink

if TYPE_CHECKING:
    from scripts.servers.management import Management

ORIGIN = "orders-queue"
COUNTS = ("delayed", "returned", "dead_lettered", "recorded", "moved", "left")


def a_bit_of_everything(team: Client) -> int:
    """One message for every decision; how many there are."""
    team.make_origin(ORIGIN)
    team.fail(ORIGIN, "orders.created", b"delayed")
    team.fail(ORIGIN, "payment.card", b"exhausted")
    team.fail(ORIGIN, "not.configured", b"not configured")
    team.fail(ORIGIN, "orders.created", b"malformed", headers={"dlqbatch-retries": -1})
    team.publish("retry-exchange", "retry-routing-key", b"of unknown origin")
    return 5


def test_a_dry_run_tells_exactly_what_the_run_after_it_does_and_moves_nothing(program: Program, team: Client) -> None:
    number = a_bit_of_everything(team)
    team.make_origin("doomed-queue", exchange="doomed")
    team.fail("doomed-queue", "orders.doomed", b"homeless", exchange="doomed")
    program.run("drain")  # into the tiers, from where they come back
    team.await_depth("retry-queue-1", 2)
    team.channel.queue_delete("doomed-queue")
    a_bit_of_everything(team)
    queues = (RETRY_QUEUE, "retry-queue-1", DLQ, ORIGIN)
    before = [team.contents(queue) for queue in queues]

    planned = program.run("drain", "--dry-run", "--json")
    in_words = program.run("drain", "--dry-run")

    assert planned.code == 0, planned.said
    assert [team.contents(queue) for queue in queues] == before
    assert in_words.out.startswith("dry run of drain: ok")
    real = program.run("drain", "--json")
    plan, done = planned.told, real.told
    assert plan["dry_run"] is True
    assert plan["counts"] == done["counts"]
    assert plan["reasons"] == done["reasons"]
    assert done["counts"] == {
        "got": number + 2,
        "delayed": 1,
        "returned": 1,
        "dead_lettered": 5,
        "recorded": 0,
        "moved": 0,
        "left": 0,
    }
    assert {(one["queue"], one["decision"], one["reason"]) for one in plan["preview"]} == {
        (RETRY_QUEUE, "delayed", ""),
        (RETRY_QUEUE, "dead_lettered", "retries-exhausted"),
        (RETRY_QUEUE, "dead_lettered", "not-configured"),
        (RETRY_QUEUE, "dead_lettered", "malformed"),
        (RETRY_QUEUE, "dead_lettered", "origin-unknown"),
        ("retry-queue-1", "returned", ""),
        ("retry-queue-1", "dead_lettered", "origin-gone"),
    }


def test_a_dry_run_shows_each_message_and_the_way_that_the_run_sends_it(program: Program, team: Client) -> None:
    team.make_origin(ORIGIN)
    team.fail(ORIGIN, "orders.created", b"one")
    assert program.run("drain").code == 0
    team.await_depth("retry-queue-1", 1)
    (line,) = program.run("drain", "--dry-run", "--json").told["preview"]
    assert (line["queue"], line["event"], line["origin"]) == ("retry-queue-1", "orders.created", ORIGIN)
    assert (line["decision"], line["exchange"], line["key"]) == (
        "returned",
        f"dlqbatch.return.{ORIGIN}",
        "orders.created",
    )


def waits(team: Client, origin: str, body: bytes) -> None:
    """Behind the first tier, on its way back."""
    headers = {"dlqbatch-id": "id-1", "dlqbatch-retries": 1, "dlqbatch-trips": 1, "dlqbatch-origin-queue": origin}
    team.publish("", "retry-queue-1", body, headers | {"dlqbatch-origin-key": "orders.created"})
    team.await_depth("retry-queue-1", 1)


def test_a_dry_run_shows_the_way_to_an_exclusive_queue(program: Program, team: Client) -> None:
    team.channel.queue_declare("mine", exclusive=True)
    waits(team, "mine", b"back")
    plan, done = (program.run("drain", *option, "--json").told for option in (["--dry-run"], []))
    assert (plan["counts"], plan["warnings"]) == (done["counts"], done["warnings"])
    assert [(line["exchange"], line["key"]) for line in plan["preview"]] == [("", "mine")]
    assert [(message.exchange, message.routing_key) for message in team.contents("mine")] == [("", "mine")]


@pytest.mark.parametrize(
    ("forbidden", "left"),
    [("dlqbatch", {}), ("dlq-exchange", {"publish-refused": 1}), ("dlqbatch|amq.default", {"origin-check-failed": 1})],
)
def test_a_dry_run_knows_what_its_login_may_not_do(
    program: Program, team: Client, management: Management, forbidden: str, left: dict[str, int]
) -> None:
    team.make_origin(ORIGIN)
    waits(team, ORIGIN, b"back")
    team.fail(ORIGIN, "payment.card", b"exhausted")
    team.await_depth(RETRY_QUEUE, 1)
    name = f"user-{secrets.token_hex(4)}"
    management.put(f"users/{name}", {"password": name, "tags": ""})
    rights = {"configure": ".*", "write": f"^(?!{forbidden})", "read": ".*"}
    management.put(f"permissions/{management.vhost}/{name}", rights)
    limited = program.but(broker_url=program.settings["broker_url"].replace("guest:guest", f"{name}:{name}"))
    plan, done = (limited.run("drain", *option, "--json").told for option in (["--dry-run"], []))
    management.delete(f"users/{name}")
    same = ("outcome", "counts", "warnings")
    assert [plan.get(part) for part in same] == [done.get(part) for part in same]
    assert {reason: number for reason, number in done["reasons"].items() if reason in left} == left
    assert {reason: number for reason, number in plan["reasons"].items() if reason in left} == left
    warned = [warning for warning in done.get("warnings", []) if "'dlq-exchange' takes nothing from us" in warning]
    assert len(warned) == (forbidden == "dlq-exchange")
    ways = [line["exchange"] for line in plan["preview"] if line["decision"] == "returned"]
    expected = {"dlqbatch": [""], "dlq-exchange": [f"dlqbatch.return.{ORIGIN}"], "dlqbatch|amq.default": [""] * 0}
    assert ways == expected[forbidden]


def test_a_dry_run_finds_what_would_keep_the_run_from_starting(program: Program, team: Client) -> None:
    team.make_origin(ORIGIN)
    team.fail(ORIGIN, "orders.created", b"one")
    for change in ({"tier_ttls": "50,60,70"}, {"database_url": "sqlite:////nowhere/dlqbatch.sqlite3"}):
        told = program.but(**change).run("drain", "--dry-run")
        assert told.code == 2, told.said
        done = program.but(**change).run("drain")
        assert json.loads(told.err)["fields"] == json.loads(done.err)["fields"]


def test_options_alone_are_a_drain_as_no_options_are(program: Program, team: Client) -> None:
    assert program.run("--json").told["job"] == "drain"
    assert program.run("--dry-run").out.startswith("dry run of drain")


def test_a_dry_run_declares_nothing(program: Program, team: Client, management: Management) -> None:
    for queue in [one["name"] for one in management.queues()]:
        team.channel.queue_delete(queue)
    done = program.run("drain", "--dry-run")
    assert done.code == 2
    assert "topology apply" in done.err
    assert management.queues() == []


def many(team: Client, number: int, size: int = 10) -> None:
    """As many failures as wanted, in the retry queue, with their origin in the broker's own words."""
    team.make_origin(ORIGIN)
    team.expire("orders", "orders.created", (b"%06d" % n + b"." * (size - 6) for n in range(number)))
    team.await_depth(RETRY_QUEUE, number)


@pytest.mark.parametrize("bound", [1, 7, 20, 21])
def test_exactly_max_messages_are_taken(program: Program, team: Client, bound: int) -> None:
    many(team, 20)
    told = program.run("drain", "--max-messages", str(bound), "--json").told
    taken = min(bound, 20)
    assert (told["counts"]["got"], told["counts"]["delayed"]) == (taken, taken)
    assert told["stopped_by"] == ("messages" if bound < 20 else "empty")
    assert team.depth(RETRY_QUEUE) == 20 - taken


def test_taking_ends_at_max_bytes(program: Program, team: Client) -> None:
    many(team, 20, size=1000)
    told = program.run("drain", "--max-bytes", "5kB", "--json").told
    assert (told["outcome"], told["stopped_by"]) == ("ok", "bytes")
    assert told["counts"]["got"] == told["counts"]["delayed"] == 5
    assert team.depth(RETRY_QUEUE) == 15


def test_taking_ends_at_max_seconds(program: Program, team: Client, broker_url: str) -> None:
    many(team, 2000, size=1000)
    with SlowLink(broker_url, pause_after=100_000) as link:
        done = program.but(broker_url=link.url).start("drain", "--max-seconds", "1.5", "--json")
        assert link.paused.wait(HANGS_AFTER)
        assert link.quiet_for(1.6)
        link.go_on()
        out, err = done.communicate(timeout=HANGS_AFTER)
    told = json.loads(out)
    assert (done.returncode, told["outcome"], told["stopped_by"]) == (0, "ok", "time"), err
    assert 0 < told["counts"]["got"] == told["counts"]["delayed"] < 2000
    team.await_depth(RETRY_QUEUE, 2000 - told["counts"]["got"])
    team.await_depth("retry-queue-1", told["counts"]["got"])


def test_a_run_whose_time_was_over_before_it_began_says_so(program: Program, team: Client, broker_url: str) -> None:
    many(team, 20)
    with SlowLink(broker_url, pause_after=600) as link:
        done = program.but(broker_url=link.url, settle_seconds="0.1").start("drain", "--max-seconds", "0.1", "--json")
        assert link.paused.wait(HANGS_AFTER)
        assert link.quiet_for(0.5)
        link.go_on()
        out, err = done.communicate(timeout=HANGS_AFTER)
    told = json.loads(out)
    assert (told["stopped_by"], told["counts"]["got"]) == ("time", 0), err
    team.await_depth(RETRY_QUEUE, 20)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_run_in_order_and_everything_taken_is_settled(
    program: Program, team: Client, broker_url: str, number: signal.Signals
) -> None:
    many(team, 2000, size=1000)
    with SlowLink(broker_url, pause_after=100_000) as link:
        done = program.but(broker_url=link.url).start("drain", "--json")
        assert link.paused.wait(HANGS_AFTER)
        done.send_signal(number)
        link.go_on()
        out, err = done.communicate(timeout=HANGS_AFTER)
    told = json.loads(out)
    assert (done.returncode, told["outcome"], told["stopped_by"]) == (0, "ok", "signal"), err
    assert told["counts"]["got"] == sum(told["counts"][name] for name in COUNTS)
    assert 0 < told["counts"]["got"] == told["counts"]["delayed"] < 2000
    team.await_depth(RETRY_QUEUE, 2000 - told["counts"]["got"])
    team.await_depth("retry-queue-1", told["counts"]["got"])


def test_messages_that_come_back_at_once_do_not_keep_a_run_alive(
    program: Program, team: Client, broker_url: str
) -> None:
    many(team, 200)
    program.run("drain")
    team.await_depth("retry-queue-1", 200)
    stop = threading.Event()

    def reject_everything() -> None:
        consumer = Client(broker_url)
        while not stop.is_set():
            consumer.reject_all(ORIGIN)
        consumer.close()

    failing = threading.Thread(target=reject_everything)
    failing.start()
    try:
        told = program.run("drain", "--json").told
    finally:
        stop.set()
        failing.join(HANGS_AFTER)
    assert (told["counts"]["got"], told["counts"]["returned"], told["stopped_by"]) == (200, 200, "empty")
    team.reject_all(ORIGIN)
    team.await_depth(RETRY_QUEUE, 200)


ESCAPES = "\x1b[31mred\x1b]0;title\x07\r\x9b1m"


def test_terminal_escapes_of_a_message_never_reach_the_terminal(program: Program, team: Client) -> None:
    queue = f"queue-{ESCAPES}".replace("\r", "")  # the broker itself takes that out of a queue's name
    team.make_origin(queue)
    team.fail(queue, f"orders.{ESCAPES}", b"one")
    team.fail(queue, ESCAPES, b"two", headers={"dlqbatch-retries": "\x1b[2J"})
    team.publish("retry-exchange", "retry-routing-key", b"three", {"x-original-exchange": ESCAPES})
    for arguments in (("drain", "--dry-run"), ("drain",), ("events", "test", f"orders.{ESCAPES}")):
        done = program.but(log_format="text").run(*arguments)
        assert done.code == 0, done.said
        assert set(done.said.replace("\n", "")).isdisjoint(set(map(chr, range(32))) | {"\x7f", "\x9b"})
    team.await_depth("retry-queue-1", 1)
    team.channel.queue_delete(queue)
    done = program.but(log_format="text").run("drain")
    assert "origin-gone" in done.out
    assert "\x1b" not in done.said
