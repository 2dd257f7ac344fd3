"""Messages of every kind: each is found once, unchanged, where a table of the tests' own puts it.

There are 20,000 of them; DLQBATCH_TEST_LONG=1 makes it 100,000.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import oracle
import pytest
from drain_setup import COPY, LADDER, ORIGIN, set_stage, waiting
from every_kind_of_message import DELAYS, LONG_NAMED, ORIGINS, PAYMENTS, PLACES, Case, Maker
from rawamqp import PROPERTIES_MAX, Message, Peer, Seen, binary, death, headers_of, number, properties

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from drain_setup import Stage

    from scripts.servers.management import Management

MESSAGES = 100_000 if os.environ.get("DLQBATCH_TEST_LONG") else 20_000
PER_RUN = 5_000


def declare(peer: Peer) -> None:
    dead_letters = {"x-dead-letter-exchange": "retry-exchange", "x-dead-letter-routing-key": "retry-routing-key"}
    for queue in (PAYMENTS, LONG_NAMED):
        peer.queue(queue, dead_letters)
    peer.exchange("work")
    peer.bind(ORIGIN, "work", b"#")
    peer.exchange("edge.unroutable", "fanout")
    peer.exchange("edge", arguments={"alternate-exchange": "edge.unroutable"})
    peer.bind("retry-queue", "edge.unroutable")
    # The copies are what the broker itself made of each message before dlqbatch saw it.
    peer.bind(COPY, "edge.unroutable")
    peer.bind(COPY, "retry-exchange", b"retry-routing-key")
    for tier in (1, 2, 3):
        peer.bind(COPY, f"retry-exchange-{tier}", b"retry.#.%d" % tier)


def misplaced(case: Case, before: Seen, after: Seen, stage: Stage) -> list[str]:
    wrong = [] if after.queue == case.queue else [f"belongs in {case.queue}"]
    if after.key != case.key:
        wrong.append(f"key {after.key!r} instead of {case.key!r}")
    ours = dict(headers_of(after.properties))
    reason = ours.get(b"dlqbatch-reason", b"")[5:].decode()
    if reason.partition(":")[0] != (case.reason or ""):
        wrong.append(f"reason {reason!r} instead of {case.reason!r}")
    told = {name: ours.get(b"dlqbatch-" + name) for name in case.ours}
    wrong += [
        f"{name!r} is {told[name]!r} instead of {value!r}" for name, value in case.ours.items() if told[name] != value
    ]
    if case.reason == "malformed":
        written = {b"dlqbatch-" + name for name in (b"id", b"trips", b"reason", b"dead-at", b"history")}
        evidence = [
            entry for entry in headers_of(before.properties) if entry[0] in oracle.OURS and entry[0] not in written
        ]
        kept = [name for name, value in evidence if ours.get(name) == value or name.startswith(b"dlqbatch-origin")]
        wrong += [f"the evidence {name!r} is gone" for name, _ in evidence if name not in kept]
    large = len(before.properties) > PROPERTIES_MAX - 10_000
    login = stage.login.encode()
    return wrong + oracle.changes(before, after, login) + ([] if large else oracle.moved(before, after, login))


@pytest.mark.slow
def test_each_of_many_messages_is_found_once_where_it_belongs_and_unchanged(
    broker_url: str, management: Management, tmp_path: Path
) -> None:
    seed = secrets.randbits(32)
    sys.stdout.write(f"seed {seed}\n")  # pytest shows it when the test fails
    with set_stage(broker_url, management, tmp_path) as stage, Peer(broker_url) as peer:
        declare(peer)
        cases: dict[bytes, Case] = {}
        peer.publish(_told(case, cases) for case in Maker(seed).cases(MESSAGES))
        assert len(cases) == MESSAGES
        peer.reject(*ORIGINS)
        peer.wait_for(lambda: waiting(peer) == peer.depth(COPY) == MESSAGES, "every message to be dead-lettered")
        before = {oracle.ticket_of(seen): seen for seen in peer.read(COPY)}
        assert before.keys() == cases.keys()

        reports = list(_drain_until_empty(stage, peer))

        found = peer.read(*PLACES, *LADDER)
        copies = oracle.copies(found)
        assert copies.keys() == cases.keys()
        assert copies.total() == MESSAGES
        wrong = [
            (ticket, seen.queue, problems)
            for seen in found
            if (problems := misplaced(cases[ticket := oracle.ticket_of(seen)], before[ticket], seen, stage))
        ]
        assert not wrong, f"{len(wrong)}: {wrong[:5]}"
        identities = Counter(dict(headers_of(seen.properties))[b"dlqbatch-id"] for seen in found)
        assert max(identities.values()) == 1

        queues = Counter(case.queue for case in cases.values())
        total = Counter[str]()
        reasons = Counter[str]()
        for report in reports:
            total.update(report["counts"])
            reasons.update(report["reasons"])
        delayed, returned = sum(queues[queue] for queue in DELAYS), sum(queues[queue] for queue in ORIGINS)
        counted = {"delayed": delayed, "returned": returned, "dead_lettered": queues["dlq-queue"]}
        assert {name: times for name, times in total.items() if times} == {"got": MESSAGES, **counted}
        assert reasons == Counter(case.reason for case in cases.values() if case.reason is not None)


def _told(case: Case, cases: dict[bytes, Case]) -> Message:
    cases[oracle.ticket_of(Seen("", b"", b"", False, case.message.properties, case.message.body))] = case
    return case.message


def _drain_until_empty(stage: Stage, peer: Peer) -> Iterator[dict[str, Any]]:
    settings = stage.settings(max_messages=PER_RUN)
    left = waiting(peer)
    while left:
        report = stage.drain(settings)
        assert report["outcome"] == "ok", report
        assert report["counts"]["got"] == min(left, PER_RUN)
        left -= report["counts"]["got"]
        assert waiting(peer) == left
        assert report["stopped_by"] == ("messages" if left else "empty")
        yield report


@pytest.mark.slow
@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
def test_a_message_that_goes_round_the_ladder_comes_back_each_time_as_it_was_published(
    queue_type: str, broker_url: str, management: Management, tmp_path: Path
) -> None:
    seed, count, retries, key = secrets.randbits(32), 1_000, 5, b"payment.card.refused"
    sys.stdout.write(f"seed {seed}\n")
    with (
        set_stage(broker_url, management, tmp_path, DLQBATCH_QUEUE_TYPE=queue_type) as stage,
        Peer(broker_url) as peer,
    ):
        settings, maker, before = stage.settings(), Maker(seed), dict[bytes, Seen]()
        declare(peer)
        peer.publish(maker.failing(key) for _ in range(count))
        for used in range(retries + 1):
            came = peer.reject(ORIGIN)
            copies = copies_of(peer, "retry-queue", count)
            before = before or copies
            assert [seen.key for seen in came] == [key] * count
            if used:
                check_round(stage, before, came, used)
            counts = stage.drain(settings)["counts"]
            if used == retries:
                break
            assert counts["delayed"] == counts["got"] == count
            tier = min(used + 1, 3)
            peer.reject(f"queue.delay.{tier}")
            copies_of(peer, f"retry-queue-{tier}", count)
            counts = stage.drain(settings)["counts"]
            assert counts["returned"] == counts["got"] == count
        assert counts["dead_lettered"] == counts["got"] == count
        check_round(stage, before, peer.read("dlq-queue"), retries)
        assert [peer.depth(queue) for queue in (*LADDER, *DELAYS, ORIGIN)] == [0] * 8


def copies_of(peer: Peer, queue: str, count: int) -> dict[bytes, Seen]:
    """What the broker made of the messages that it has just dead-lettered into a queue of the ladder."""
    peer.wait_for(lambda: peer.depth(queue) == peer.depth(COPY) == count, "every message to be dead-lettered")
    return {oracle.ticket_of(seen): seen for seen in peer.read(COPY)}


def check_round(stage: Stage, before: dict[bytes, Seen], came: list[Seen], used: int) -> None:
    assert oracle.copies(came) == Counter(before.keys())
    wrong = [problems for seen in came if (problems := stage.changes(before[oracle.ticket_of(seen)], seen))]
    assert not wrong, f"retry {used}: {len(wrong)}: {wrong[:3]}"
    assert {dict(headers_of(seen.properties))[b"dlqbatch-retries"] for seen in came} == {number(used)}


def test_a_message_with_no_room_for_our_headers_stays_as_it_is_and_stops_no_other(
    broker_url: str, management: Management, tmp_path: Path
) -> None:
    with set_stage(broker_url, management, tmp_path) as stage, Peer(broker_url) as peer:
        declare(peer)
        large = [_filled(b"t-%d" % room, PROPERTIES_MAX - room) for room in (0, 50, 300)]
        peer.publish(Message("work", b"orders.created", content, b"") for content in large[1:])
        peer.reject(ORIGIN)  # the broker adds its death, and so delivers a longer frame than it agreed to
        small = properties([death(ORIGIN, b"orders.created")], correlation_id=b"t-small")
        rest = [Message("retry-exchange", b"retry-routing-key", content, b"") for content in (large[0], small, small)]
        peer.publish(rest)
        peer.wait_for(lambda: peer.depth("retry-queue") == peer.depth(COPY) == 5, "every message to be there")
        before = {oracle.ticket_of(seen): seen for seen in peer.read(COPY)}

        for got, moved in ((5, 2), (3, 0)):
            report = stage.drain(stage.settings())
            assert (report["outcome"], report["stopped_by"]) == ("partial", "empty")
            counts = {name: times for name, times in report["counts"].items() if times}
            assert counts == {"got": got, "left": 3} | ({"delayed": moved} if moved else {})
            assert report["reasons"] == {"headers-too-large": 3}
        assert peer.depth("queue.delay.1") == 2
        stayed = peer.read("retry-queue")
        assert {oracle.ticket_of(seen) for seen in stayed} == {b"t-0", b"t-50", b"t-300"}
        assert all(seen.properties == before[oracle.ticket_of(seen)].properties for seen in stayed)


def _filled(ticket: bytes, size: int) -> bytes:
    """Properties of exactly this many bytes."""
    empty = len(properties([(b"large", binary(b""))], correlation_id=ticket))
    return properties([(b"large", binary(b"x" * (size - empty)))], correlation_id=ticket)
