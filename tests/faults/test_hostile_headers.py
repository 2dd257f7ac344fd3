"""Headers that imitate ours: what a publisher may gain by them, and what never (docs/security.md)."""

from __future__ import annotations

import secrets
import sqlite3
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import oracle
import pytest
from drain_setup import LADDER, ORIGIN, set_stage, waiting
from hostile import Hostile
from rawamqp import AmqpError, Message, Peer, array, number, properties, table, text, timestamp
from ready_store import make_tables

from dlqbatch.jobs import RunOptions, run

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from drain_setup import Stage
    from rawamqp import Entry

    from scripts.servers.management import Management

VICTIM, WAY_BACK = "victim", "dlqbatch.return.victim"
DELAYS = tuple(f"queue.delay.{tier}" for tier in (1, 2, 3))
DEAD = "dlq-queue"
KEY = b"payment.card"
MESSAGES = 300

pytestmark = pytest.mark.usefixtures("on_every_broker")


@pytest.fixture
def peer(broker_url: str) -> Iterator[Peer]:
    with Peer(broker_url) as opened:
        yield opened


def declare(peer: Peer) -> None:
    """A publisher's exchange that leads to ORIGIN; somebody else's queue, which many ways would lead to."""
    peer.exchange("work")
    peer.bind(ORIGIN, "work", b"#")
    peer.exchange("edge.unroutable", "fanout")
    peer.exchange("edge", arguments={"alternate-exchange": "edge.unroutable"})
    peer.bind("retry-queue", "edge.unroutable")
    peer.queue(VICTIM)
    for exchange in (VICTIM, WAY_BACK):
        peer.exchange(exchange, "fanout")
        peer.bind(VICTIM, exchange)
    peer.bind(VICTIM, "edge", b"victim")


def rounds(stage: Stage, peer: Peer, total: int, most: int, **settings: Any) -> list[dict[str, Any]]:
    """The ladder, with a consumer that rejects everything, until nothing moves any more."""
    reports = []
    peer.reject(ORIGIN)
    for _ in range(most):
        peer.wait_for(lambda: waiting(peer) + peer.depth(DEAD) + peer.depth(VICTIM) == total, "all to be in the ladder")
        if not waiting(peer):
            return reports
        reports.append(stage.drain(stage.settings(max_messages=10_000, **settings)))
        peer.reject(*DELAYS, ORIGIN)
    pytest.fail(f"it has not come to rest in {most} rounds: {reports[-3:]}")


def publish(peer: Peer, forged: Sequence[tuple[str, bytes, list[Entry]]]) -> set[bytes]:
    tickets = [b"t-%d" % place for place in range(len(forged))]
    peer.publish(
        Message(exchange, key, properties(headers, correlation_id=ticket), b"")
        for ticket, (exchange, key, headers) in zip(tickets, forged, strict=True)
    )
    return set(tickets)


@pytest.mark.parametrize("return_via", ["queue", "exchange"])
def test_whatever_a_publisher_writes_into_its_headers_no_other_queue_gets_it_and_it_comes_to_rest(
    return_via: str, broker_release: str, broker_url: str, management: Management, tmp_path: Path, peer: Peer
) -> None:
    seed = secrets.randbits(32)
    sys.stdout.write(f"seed {seed}\n")
    hostile = Hostile(seed, (VICTIM, WAY_BACK, "work", "edge", ORIGIN))
    ways = (("work", KEY), ("", ORIGIN.encode()), ("edge", KEY))
    with set_stage(broker_url, management, tmp_path) as stage:
        declare(peer)
        # Through an alternate exchange the broker writes no death, and whoever publishes there could: see below.
        # Before 4.0 it keeps exchange and keys of a death that a client wrote: docs/security.md says where that leads.
        can_name = {way for way, _ in ways} if (return_via, broker_release) == ("exchange", "installed") else {"edge"}
        forged = [
            (way, key, [each for each in hostile.forged(mild=True) if way not in can_name or each[0] != b"x-death"])
            for way, key in hostile.random.choices(ways, k=MESSAGES)
        ]
        tickets = publish(peer, forged)

        reports = rounds(stage, peer, MESSAGES, 120, return_via=return_via)

        reached = peer.read(VICTIM)
        told = [forged[int(oracle.ticket_of(seen)[2:])] for seen in reached]
        assert not reached, f"{len(reached)} reached somebody else's queue, such as {told[:2]}"
        found = peer.read(DEAD, ORIGIN, *LADDER, *DELAYS)
        assert oracle.copies(found) == Counter(tickets)
        assert {report["outcome"] for report in reports} == {"ok"}


@pytest.mark.parametrize("count", [-1, 0, 1])
def test_a_death_of_the_publishers_own_making_names_no_exchange_to_return_through_since_4(
    count: int, broker_release: str, broker_url: str, management: Management, tmp_path: Path, peer: Peer
) -> None:
    """Before, the broker adds to a death that a client wrote, and leaves its exchange and keys as they are."""
    told = {b"count": number(count), b"reason": text("rejected"), b"queue": text(ORIGIN), b"time": timestamp(1)}
    forged = (b"x-death", array(table((told | {b"exchange": text(VICTIM), b"routing-keys": array(text(KEY))}).items())))
    recorded = [(b"dlqbatch-origin-queue", text(ORIGIN)), (b"dlqbatch-origin-exchange", text(VICTIM))]
    recorded.append((b"dlqbatch-origin-key", text(KEY)))
    with set_stage(broker_url, management, tmp_path) as stage:
        declare(peer)
        publish(peer, [("work", KEY, [forged]), ("work", KEY, recorded), ("work", KEY, [forged, *recorded])])

        rounds(stage, peer, 3, 120, return_via="exchange")

        named = 2 if broker_release == "installed" else 0
        assert (peer.depth(VICTIM), peer.depth(DEAD)) == (named, 3 - named)


def test_behind_an_alternate_exchange_a_key_that_a_client_recorded_is_no_key_to_return_with(
    broker_url: str, management: Management, tmp_path: Path, peer: Peer
) -> None:
    # It may not publish with the key that leads there, by a topic permission.
    recorded = [(b"dlqbatch-origin-exchange", text("edge")), (b"dlqbatch-origin-key", text(VICTIM))]
    with set_stage(broker_url, management, tmp_path) as stage:
        declare(peer)
        publish(peer, [("edge", KEY, recorded)])

        rounds(stage, peer, 1, 120)

        assert (peer.depth(VICTIM), peer.depth(DEAD)) == (0, 1)


def test_of_two_subscribers_who_get_an_id_that_the_publisher_wrote_each_failure_becomes_a_row(
    broker_url: str, management: Management, tmp_path: Path, peer: Peer
) -> None:
    with set_stage(broker_url, management, tmp_path) as stage:
        declare(peer)
        dead = {"x-dead-letter-exchange": "retry-exchange", "x-dead-letter-routing-key": "retry-routing-key"}
        peer.queue("second", dead)
        peer.bind("second", "work", b"#")
        publish(peer, [("work", b"nobody.knows", [(b"dlqbatch-id", text("mine"))])])
        peer.reject("second")
        rounds(stage, peer, 2, 3)
        settings = stage.settings()
        make_tables(settings.database_url.get_secret_value())

        report = run("ingest", settings, RunOptions()).as_dict()

        counts = {name: count for name, count in report["counts"].items() if count}
        assert counts == {"got": 2, "recorded": 2}
        with sqlite3.connect(stage.variables["DLQBATCH_DATABASE_URL"].removeprefix("sqlite:///")) as store:
            rows = store.execute("SELECT origin_queue FROM dlq_messages ORDER BY 1").fetchall()
        store.close()
        assert rows == [("second",), (ORIGIN,)]


def forged_death(queue: str, exchange: str = "") -> Entry:
    told = {b"count": number(1), b"reason": text("rejected"), b"queue": text(queue), b"time": timestamp(1)}
    return b"x-death", array(table((told | {b"exchange": text(exchange), b"routing-keys": array(text(KEY))}).items()))


def test_who_may_publish_to_the_retry_queue_reaches_only_queues_that_our_own_login_may_write_to(
    broker_url: str, management: Management, tmp_path: Path, peer: Peer
) -> None:
    with set_stage(broker_url, management, tmp_path) as stage:
        declare(peer)
        stage.drain(stage.settings())  # it declares, and knows so afterwards
        # As docs/permissions.md has it, for the origins alone.
        rights = {"configure": rf"^dlqbatch\.return\.{ORIGIN}$", "read": ".*"}
        rights["write"] = rf"^(route-delay|retry-queue-\d+|dlq-exchange|dlqbatch\.return\.{ORIGIN}|{ORIGIN})$"
        management.put(f"permissions/{management.vhost.replace('/', '%2F')}/{stage.login}", rights)
        publish(
            peer,
            [
                ("retry-exchange", b"retry-routing-key", [forged_death(VICTIM)]),
                ("retry-exchange", b"retry-routing-key", [forged_death(ORIGIN)]),
                ("edge", KEY, [forged_death(VICTIM)]),
            ],
        )
        assert stage.drain(stage.settings())["counts"]["delayed"] == 3
        peer.reject(*DELAYS)
        peer.wait_for(lambda: waiting(peer) == 3, "all to be back")

        report = stage.drain(stage.settings())

        assert (peer.depth(VICTIM), peer.depth(ORIGIN)) == (0, 1)
        assert (report["outcome"], report["reasons"]) == ("partial", {"origin-check-failed": 2})


def test_a_topic_permission_keeps_a_team_from_publishing_there_and_lets_its_queue_dead_letter_there(
    broker_url: str, management: Management, tmp_path: Path, peer: Peer
) -> None:
    team, place = f"team-{secrets.token_hex(4)}", management.vhost.replace("/", "%2F")
    with set_stage(broker_url, management, tmp_path) as stage:
        declare(peer)
        management.put(f"users/{team}", {"password": "x", "tags": ""})
        try:
            rights = {"configure": "^team", "write": "^(team|work|retry-exchange)", "read": "^team"}
            management.put(f"permissions/{place}/{team}", rights)
            nothing = {"exchange": "retry-exchange", "write": "^$", "read": "^$"}
            management.put(f"topic-permissions/{place}/{team}", nothing)
            url = f"amqp://{team}:x@{broker_url.rpartition('@')[2]}"
            with Peer(url) as theirs:
                dead = {"x-dead-letter-exchange": "retry-exchange", "x-dead-letter-routing-key": "retry-routing-key"}
                theirs.queue("team", dead)
                peer.bind("team", "work", b"#")
                publish(theirs, [("work", KEY, [forged_death(VICTIM)])])
                theirs.reject("team")
                peer.reject(ORIGIN)
                peer.wait_for(lambda: waiting(peer) == 2, "both to be dead-lettered")
                with pytest.raises(AmqpError, match="ACCESS_REFUSED"):
                    publish(theirs, [("retry-exchange", b"retry-routing-key", [forged_death(VICTIM)])])
            assert peer.depth("retry-queue") == 2
        finally:
            management.delete(f"users/{team}")
        assert stage.drain(stage.settings())["counts"]["delayed"] == 2
