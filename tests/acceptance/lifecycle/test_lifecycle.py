"""A dead message's way through the store: sent again, failed again, resolved by what is observed; a real broker."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from program import DLQ, Client, Program, eventually

from dlqbatch import jobs, settings
from dlqbatch.errors import BrokerUnreachable, DatabaseUnreadable, SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator

ORIGIN = "payment-queue"
QUICK = {
    "retry_delays": "1ms",
    "recheck": "1ms",
    "observation_window": "1ms",
    "breaker_cool_down": "1ms",
    "off_peak_hours": ",".join(map(str, range(24))),
}
TIMEOUT = {"dlqbatch-id": "made-up", "x-exception-type": "java.net.SocketTimeoutException"}


@dataclass
class Scene:
    """The jobs as a scheduler runs them, in this process; and the store as SQL sees it."""

    team: Client
    given: dict[str, str]
    store: psycopg.Connection[Any]
    reports: list[dict[str, Any]] = field(default_factory=list)

    def run(self, job: str, *, dry_run: bool = False, **changes: str) -> dict[str, Any]:
        loaded = settings.load(self.given | changes, {"DLQBATCH_CONFIG": "/dev/null"})
        return jobs.run(job, loaded, jobs.RunOptions(dry_run=dry_run)).as_dict()

    def lifecycle(self, *, dry_run: bool = False, **changes: str) -> dict[str, int]:
        report = self.run("lifecycle", dry_run=dry_run, **changes)
        self.reports.append(report)
        counts = dict(report["counts"])
        resolved = counts.pop("resolved")
        assert counts["got"] == sum(number for name, number in counts.items() if name != "got"), report
        return {name: number for name, number in {**counts, "resolved": resolved}.items() if number}

    def look(self) -> None:
        """A drain and an ingest that find nothing and have looked everywhere."""
        for job in ("drain", "ingest"):
            assert self.run(job)["stopped_by"] == "empty"

    def fail(self) -> None:
        """The consumer rejects what it got; the drain dead-letters it, and the ingest makes it a row or updates one."""
        before = self.team.depth("retry-queue")
        rejected = self.team.reject_all(ORIGIN)
        self.team.await_depth("retry-queue", before + rejected)
        assert self.run("drain")["counts"]["dead_lettered"] == rejected
        self.team.await_depth(DLQ, rejected)
        assert self.run("ingest")["counts"]["recorded"] == rejected

    def rows(self) -> list[tuple[Any, ...]]:
        return self.store.execute("SELECT status, dlq_retry_count, strategy FROM dlq_messages ORDER BY id").fetchall()

    def await_due(self) -> None:
        due = "SELECT count(*) FROM dlq_messages WHERE status = 'pending' AND next_retry_at <= now()"
        assert eventually(lambda: self.store.execute(due).fetchone() != (0,))

    def attempts(self) -> list[tuple[Any, ...]]:
        return self.store.execute(
            "SELECT number, sent_at IS NOT NULL, outcome FROM dlq_attempts ORDER BY message_id, number"
        ).fetchall()


@pytest.fixture
def scene(program: Program, team: Client, database_url: str) -> Iterator[Scene]:
    done = Program({"database_url": database_url}).run("db", "upgrade")
    assert done.code == 0, done.said
    team.make_origin(ORIGIN, key="payment.#")
    given = {**program.settings, "database_url": database_url}
    with psycopg.connect(database_url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute("INSERT INTO dlq_event_config VALUES (1, 'payment.#', 0)")
        yield Scene(team, given | QUICK, connection)


@pytest.fixture
def dead(scene: Scene) -> Scene:
    """One payment has failed with what the rules call a time-out, and is a row."""
    scene.team.publish("orders", "payment.card", b"pay", {"x-exception-message": "connection timed out"})
    scene.fail()
    assert scene.rows() == [("pending", 0, None)]
    scene.await_due()
    return scene


@pytest.mark.quick
def test_it_is_sent_fails_again_is_sent_and_is_resolved_only_when_somebody_has_looked(dead: Scene) -> None:
    scene, team = dead, dead.team
    assert scene.lifecycle() == {"got": 1, "sent": 1}
    assert scene.rows() == [("processing", 0, None)]  # its attempt knows the strategy
    (back,) = team.contents(ORIGIN)
    assert (back.body, back.routing_key) == (b"pay", "payment.card")
    assert (back.headers["dlqbatch-attempt"], back.headers["dlqbatch-origin-queue"]) == (1, ORIGIN)
    assert not {"dlqbatch-reason", "dlqbatch-dead-at"} & back.headers.keys()

    scene.fail()
    assert scene.rows() == [("pending", 1, "immediate")]
    scene.await_due()
    assert scene.lifecycle() == {"got": 1, "sent": 1}
    assert scene.attempts() == [(1, True, "failed"), (2, True, None)]

    # Nobody has looked since; then somebody has, but the message still waits in a queue without a consumer.
    assert scene.lifecycle() == {}
    scene.look()
    assert scene.lifecycle() == {}
    assert "1 ready, 0 consumer(s)" in scene.reports[-1]["warnings"][0]

    method, _, _ = team.channel.basic_get(ORIGIN)
    team.channel.basic_ack(method.delivery_tag)
    team.await_depth(ORIGIN, 0)
    assert scene.lifecycle() == {"resolved": 1}
    assert scene.rows() == [("resolved", 1, "immediate")]
    assert scene.attempts() == [(1, True, "failed"), (2, True, "succeeded")]


def test_an_ingest_alone_or_one_before_the_drain_is_not_enough(dead: Scene) -> None:
    dead.lifecycle()
    dead.team.channel.queue_purge(ORIGIN)
    dead.run("ingest")
    dead.run("drain")
    assert dead.lifecycle() == {}
    assert "no drain that saw 'retry-queue', 'retry-queue-1'" in dead.reports[-1]["warnings"][0]
    dead.run("ingest")
    assert dead.lifecycle() == {"resolved": 1}


def test_within_the_window_nothing_is_resolved_however_often_somebody_looks(dead: Scene) -> None:
    dead.lifecycle()
    dead.team.channel.queue_purge(ORIGIN)
    dead.look()
    assert dead.lifecycle(observation_window="15m") == {}
    assert dead.lifecycle() == {"resolved": 1}


def test_five_failures_end_in_failed_and_a_sixth_try_needs_a_person(dead: Scene) -> None:
    for number in range(1, 6):
        assert dead.lifecycle() == {"got": 1, "sent": 1}
        dead.fail()
        assert dead.rows() == [("failed" if number == 5 else "pending", number, "immediate")]
        if number < 5:
            dead.await_due()
    assert dead.lifecycle() == {}
    assert dead.attempts() == [(number, True, "failed") for number in range(1, 6)]


def test_what_was_resolved_and_comes_back_late_is_pending_again(dead: Scene) -> None:
    dead.lifecycle()
    held, _, _ = dead.team.channel.basic_get(ORIGIN)  # a consumer that takes its time
    dead.look()
    assert dead.lifecycle() == {"resolved": 1}
    dead.team.channel.basic_reject(held.delivery_tag, requeue=False)
    dead.team.await_depth("retry-queue", 1)
    assert dead.run("drain")["counts"]["dead_lettered"] == 1
    assert dead.run("ingest")["reasons"] == {"attempt-failed": 1}
    assert dead.rows() == [("pending", 1, "immediate")]
    assert dead.attempts() == [(1, True, "failed")]


def test_a_dry_run_shows_what_would_be_sent_and_changes_nothing(dead: Scene) -> None:
    assert dead.lifecycle(dry_run=True) == {"got": 1, "sent": 1}
    (line,) = dead.reports[-1]["preview"]
    assert (line["decision"], line["origin"], line["event"]) == ("sent", ORIGIN, "payment.card")
    assert dead.rows() == [("pending", 0, None)]
    assert dead.attempts() == []
    dead.team.await_depth(ORIGIN, 0)
    dead.lifecycle()
    dead.team.channel.queue_purge(ORIGIN)
    dead.look()
    assert dead.lifecycle(dry_run=True) == {"resolved": 1}
    assert dead.rows() == [("processing", 0, None)]


def test_an_origin_that_is_gone_leaves_it_to_a_person(dead: Scene) -> None:
    dead.team.channel.queue_delete(ORIGIN)
    assert dead.lifecycle() == {"got": 1, "manual": 1}
    assert dead.reports[-1]["reasons"] == {"origin-gone": 1}
    assert dead.rows() == [("manual", 0, "immediate")]
    assert dead.attempts() == [(1, False, "abandoned")]


def test_an_exchange_that_takes_no_message_leaves_it_for_later(dead: Scene) -> None:
    """Returned as unroutable: not an attempt, so that it does not count as one that failed."""
    team = dead.team
    team.publish("", DLQ, b"lost", {"dlqbatch-origin-exchange": "orders", "dlqbatch-origin-key": "nobody.listens"})
    dead.store.execute("DELETE FROM dlq_messages")
    dead.run("ingest")
    dead.store.execute("UPDATE dlq_messages SET error_message = 'connection timed out'")
    dead.await_due()
    assert dead.lifecycle(recheck="1h") == {"got": 1, "left": 1}
    assert dead.reports[-1]["reasons"] == {"unroutable": 1}
    assert dead.reports[-1]["outcome"] == "partial"
    assert dead.rows() == [("pending", 0, "immediate")]
    waits = dead.store.execute("SELECT next_retry_at - now() > interval '50 min' FROM dlq_messages").fetchone()
    assert waits == (True,)


def test_a_broker_that_is_down_claims_nothing(dead: Scene) -> None:
    with pytest.raises(BrokerUnreachable):
        dead.lifecycle(broker_url="amqp://guest:guest@127.0.0.1:1/", connect_timeout_seconds="1")
    assert dead.rows() == [("pending", 0, None)]


def test_a_database_that_is_down_or_was_not_named_sends_nothing(dead: Scene) -> None:
    with pytest.raises(DatabaseUnreadable):
        dead.lifecycle(database_url="postgresql://nobody@127.0.0.1:1/none", connect_timeout_seconds="1")
    del dead.given["database_url"]
    with pytest.raises(SettingsError, match="DLQBATCH_DATABASE_URL"):
        dead.lifecycle()
    dead.team.await_depth(ORIGIN, 0)
