"""Generated messages of every type and depth that a broker takes, through one job after the other.

DLQBATCH_TEST_LONG=1 makes it 100,000; each is looked for by code that uses nothing of dlqbatch.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import oracle
import pytest
from drain_setup import COPY, LADDER, ORIGIN, check_sum, set_stage, waiting
from hostile import Hostile
from rawamqp import PROPERTIES_MAX, Message, Peer, headers_of, named_properties, properties
from ready_store import make_tables

from dlqbatch.jobs import RunOptions, run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rawamqp import Seen

    from scripts.servers.management import Management

MESSAGES = 100_000 if os.environ.get("DLQBATCH_TEST_LONG") else 2_000
STORED = 5_000
"""So many at most go on into the dead store."""
DELAYS = tuple(f"queue.delay.{tier}" for tier in (1, 2, 3))
DEAD, FAILED, DEAD_COPY = "dlq-queue", "permanent_failure_queue", "copy-of-the-dead"


def made(seed: int) -> Iterator[Message]:
    hostile = Hostile(seed, ("victim", ORIGIN, "dlqbatch.return.victim"))
    dice = hostile.random
    for number in range(MESSAGES):
        headers = (hostile.forged() if dice.random() < 0.6 else []) + hostile.any_entries(dice.randrange(5), 5)
        dice.shuffle(headers)
        named: dict[str, bytes | int] = {"correlation_id": b"t-%d" % number}
        for name in ("content_type", "content_encoding", "reply_to", "message_id", "type", "app_id", "cluster_id"):
            if dice.random() < 0.2:
                named[name] = dice.choice((b"", b"x" * 255, b"\xff\0", dice.randbytes(9), b"application/json"))
        if dice.random() < 0.3:
            named |= {
                "priority": dice.randrange(256),
                "timestamp": dice.getrandbits(64),
                "delivery_mode": dice.choice((1, 2)),
            }
        if dice.random() < 0.1:
            named |= {"expiration": b"86400000", "user_id": b"guest"}
        body = dice.choice((b"", b"{" * 50, dice.randbytes(dice.randrange(300)), b"\x1b]0;x\x07"))
        yield Message("retry-exchange", b"retry-routing-key", properties(headers or None, **named), body)


def drained(stage: Any, peer: Peer) -> Counter[str]:
    total = Counter[str]()
    while waiting(peer):
        report = stage.drain(stage.settings(max_messages=5_000))
        assert report["outcome"] == "ok", report
        total.update(report["counts"])
    return total


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("on_every_broker")
def test_not_one_of_them_stops_another_or_is_changed_and_every_report_adds_up(
    broker_url: str, management: Management, tmp_path: Path
) -> None:
    seed = secrets.randbits(32)
    sys.stdout.write(f"seed {seed}\n")
    with set_stage(broker_url, management, tmp_path) as stage, Peer(broker_url) as peer:
        peer.bind(COPY, "retry-exchange", b"retry-routing-key")
        peer.publish(made(seed))
        peer.wait_for(lambda: peer.depth("retry-queue") == peer.depth(COPY) == MESSAGES, "all to be there")
        before = {oracle.ticket_of(seen): seen for seen in peer.read(COPY)}

        counts = drained(stage, peer)

        assert counts["got"] == MESSAGES
        found = peer.read(DEAD, *LADDER, *DELAYS, ORIGIN)
        assert oracle.copies(found) == Counter(before.keys())
        login = stage.login.encode()
        wrong = [
            (ticket, seen.queue, problems)
            for seen in found
            if (problems := _problems(before[ticket := oracle.ticket_of(seen)], seen, login))
        ]
        assert not wrong, f"{len(wrong)}: {wrong[:3]}"
        assert counts["delayed"] == sum(seen.queue in DELAYS for seen in found)

        dead = [seen for seen in found if seen.queue == DEAD][:STORED]
        _store(stage, peer, dead)


def _problems(before: Seen, after: Seen, login: bytes) -> list[str]:
    large = len(before.properties) > PROPERTIES_MAX - 10_000
    # Of a broker's header that a client wrote twice the first is told in the history, and the second is dropped.
    names = Counter(name for name, _ in headers_of(before.properties))
    is_doubled = any(times > 1 and name in oracle.BROKERS for name, times in names.items())
    return oracle.changes(before, after, login) + ([] if large or is_doubled else oracle.moved(before, after, login))


def _store(stage: Any, peer: Peer, dead: list[Seen]) -> None:
    peer.publish(Message("", DEAD.encode(), seen.properties, seen.body) for seen in dead)
    settings = stage.settings(check_queues=DEAD, check_max_deaths=3)
    database = stage.variables["DLQBATCH_DATABASE_URL"]
    make_tables(database)
    reports = [run("check", settings, RunOptions()).as_dict()]
    peer.wait_for(lambda: peer.depth(DEAD) + peer.depth(FAILED) == len(dead), "all to be in two queues")
    assert reports[0]["counts"]["got"] == len(dead)
    assert reports[0]["counts"]["moved"] == peer.depth(FAILED) > 0
    checked = {oracle.ticket_of(seen): seen for seen in peer.read(DEAD, FAILED)}
    before = {oracle.ticket_of(seen): seen for seen in dead}
    assert checked.keys() == before.keys()
    login = stage.login.encode()
    wrong = [
        (ticket, each) for ticket, seen in checked.items() if (each := _moved_by_check(before[ticket], seen, login))
    ]
    assert not wrong, f"{len(wrong)}: {wrong[:3]}"

    peer.publish(Message("", DEAD.encode(), seen.properties, seen.body) for seen in checked.values())
    reports.append(run("ingest", settings, RunOptions()).as_dict())
    with sqlite3.connect(database.removeprefix("sqlite:///")) as store:
        rows = store.execute("SELECT properties, body FROM dlq_messages").fetchall()
        notes = store.execute("SELECT count(*) FROM dlq_transitions WHERE from_status IS NOT NULL").fetchone()[0]
        store.execute("UPDATE dlq_messages SET is_due = 1, next_retry_at = created_at WHERE status = 'pending'")
    store.close()
    stored = {(named_properties(each)["correlation_id"], each, body) for each, body in rows}
    assert peer.depth(DEAD) == 0
    counts = reports[-1]["counts"]
    assert (counts["got"], counts["recorded"]) == (len(checked), len(rows))
    # What comes twice under one id, from one place and with one body, is one row; every other has a row of its own.
    assert counts["duplicate"] == len(checked) - len(rows) == notes
    wanted = {(ticket, seen.properties, seen.body) for ticket, seen in checked.items()}
    assert stored <= wanted

    reports.append(run("lifecycle", settings, RunOptions()).as_dict())
    for report in reports[1:]:
        assert report["outcome"] in ("ok", "partial"), report
    for report in reports:
        counts = {name: number for name, number in report["counts"].items() if name != "resolved"}
        check_sum({"counts": counts})
    with sqlite3.connect(database.removeprefix("sqlite:///")) as store:
        states = Counter(status for (status,) in store.execute("SELECT status FROM dlq_messages"))
        again = set(store.execute("SELECT properties, body FROM dlq_messages"))
    store.close()
    assert states.total() == len(rows)
    assert again == set(rows)


def _moved_by_check(before: Seen, after: Seen, login: bytes) -> list[str]:
    return [] if before.properties == after.properties else oracle.changes(before, after, login)
