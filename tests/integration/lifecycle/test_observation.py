"""What becomes of a retry that was sent and stayed away: by the broker's word on its origin and the log of runs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from broker_client import Side
from dead_rows import NOW, add, begin_attempts, store_at
from lifecycle_rows import ORIGIN, due
from program import eventually
from sqlalchemy import insert, select

from dlqbatch import jobs, settings
from dlqbatch.lifecycle import attempts, outcome
from dlqbatch.lifecycle.leases import claim
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.run_log import RunRecord, record
from dlqbatch.store.tables import ATTEMPTS, BREAKERS, MESSAGES, PLAN_ITEMS, PLANS, RUNS, TRANSITIONS
from dlqbatch.topology.kinds import Ladder
from scripts.servers.management import Management, quoted
from scripts.servers.rabbitmq import RabbitNode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy import Engine

SENT = NOW.replace(year=2020)
LOOKED = SENT + timedelta(hours=1)
MINUTE = timedelta(minutes=1)


class Scene:
    def __init__(self, broker_url: str, database_url: str) -> None:
        self.engine: Engine = store_at(database_url)
        self.urls = (broker_url, database_url)
        self.side = Side(broker_url)
        self._plans = 0

    def send(self, *rows: dict[str, Any], to_queue: str | None = None, at: datetime = SENT) -> list[int]:
        """They are under observation, as a lifecycle run or a replay leaves them."""
        ids = add(self.engine, *rows, at=at)
        tokens = {each.row_id: each.token for each in claim(self.engine, "w", at)}
        numbers = begin_attempts(self.engine, tokens, None, "w", at)
        attempts.mark_sent(self.engine, numbers, at)
        if to_queue is not None:
            self._plans += 1
            plan: dict[str, Any] = dict.fromkeys(("state_since", "created_at"), at)
            plan |= {"hash": f"h{self._plans}", "state": "done", "actor": "ann", "reason": "r", "filters": {}}
            plan |= {"to_queue": to_queue, "size": len(ids), "risks": []}
            items = {"seen_status": "pending", "seen_updated_at": at, "state": "sent", "attempt": 1}
            with writing(self.engine) as connection:
                plan_id = connection.execute(insert(PLANS).values(plan).returning(PLANS.c.id)).scalar_one()
                told = [{"plan_id": plan_id, "place": row_id, "message_id": row_id, **items} for row_id in ids]
                connection.execute(insert(PLAN_ITEMS), told)
        return ids

    def look(self, *dead_letter_queues: str, at: datetime = LOOKED) -> None:
        """A drain, and after it an ingest, have seen everything empty; a run that is logged later prunes both."""
        queues = ["dlq-queue", *dead_letter_queues]
        for job, emptied, began in (("drain", [*Ladder().queue_names], at), ("ingest", queues, at + MINUTE)):
            record(self.urls[1], RunRecord(job, began, began + MINUTE / 2, "ok", "empty", emptied, {}))

    def lifecycle(self, **changes: str) -> dict[str, Any]:
        given = {"broker_url": self.urls[0], "database_url": self.urls[1]} | changes
        loaded = settings.load(given, {"DLQBATCH_CONFIG": "/dev/null"})
        return jobs.run("lifecycle", loaded, jobs.RunOptions()).as_dict()

    def statuses(self, *ids: int) -> list[str]:
        with reading(self.engine) as connection:
            found = connection.execute(select(MESSAGES.c.id, MESSAGES.c.status).where(MESSAGES.c.id.in_(ids)))
            by_id = {row_id: str(status) for row_id, status in found}
        return [by_id[row_id] for row_id in ids]

    def outcomes(self) -> list[str | None]:
        with reading(self.engine) as connection:
            return list(connection.scalars(select(ATTEMPTS.c.outcome).order_by(ATTEMPTS.c.message_id)))

    def last_entry(self, row_id: int) -> tuple[str, str, str]:
        last = select(TRANSITIONS.c.from_status, TRANSITIONS.c.actor, TRANSITIONS.c.reason)
        with reading(self.engine) as connection:
            of_this = last.where(TRANSITIONS.c.message_id == row_id).order_by(TRANSITIONS.c.id.desc()).limit(1)
            found = connection.execute(of_this).one()
        return str(found.from_status), found.actor, found.reason


@pytest.fixture(params=["postgresql", "sqlite"])
def scene(request: pytest.FixtureRequest, broker_url: str) -> Iterator[Scene]:
    url = str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param]))
    made = Scene(broker_url, url)
    made.side.queue(ORIGIN)
    yield made
    made.side.close()


def behind_an_exchange(number: int, exchange: str) -> dict[str, Any]:
    return due(number, origin_queue=None, origin_exchange=exchange)


def test_an_origin_that_is_gone_leaves_what_was_sent_to_a_person(scene: Scene) -> None:
    channel = scene.side.channel
    for exchange in ("there", "gone"):
        channel.exchange_declare(exchange, "topic", durable=True)
    ids = scene.send(due(1), due(2, origin_queue="gone"), behind_an_exchange(3, "there"), behind_an_exchange(4, "gone"))
    channel.exchange_delete("gone")
    assert scene.lifecycle()["counts"]["resolved"] == 0
    assert scene.statuses(*ids) == ["processing"] * 4  # nobody has looked: it may come back yet
    scene.look()
    report = scene.lifecycle()
    # Which queues are behind an exchange only the management API can tell.
    assert scene.statuses(*ids) == ["resolved", "manual", "processing", "manual"]
    assert (report["counts"]["got"], report["counts"]["resolved"]) == (0, 1)
    assert report["warnings"][0].startswith("2 sent message(s) are left to a person")
    assert scene.outcomes() == ["succeeded", "abandoned", None, "abandoned"]
    start, actor, reason = scene.last_entry(ids[1])
    assert (start, actor) == ("processing", "lifecycle")
    assert reason.startswith("attempt 1 stayed away, and 'gone' is gone")
    (warning,) = scene.lifecycle()["warnings"]
    assert warning.startswith("1 sent message(s) to 'exchange there' are not resolved: the queues behind exchange")
    assert "set dlqbatch.management-url" in warning


def test_an_origin_that_cannot_be_looked_at_keeps_what_was_sent(scene: Scene) -> None:
    scene.side.channel.queue_declare("mine", exclusive=True)
    ids = scene.send(due(1, origin_queue="mine"))
    scene.look()
    assert "to 'mine' are not resolved: queue 'mine': nobody has looked at it" in scene.lifecycle()["warnings"][0]
    assert scene.statuses(*ids) == ["processing"]


@pytest.mark.parametrize("to_queue", [None, "stuck"])
def test_a_page_of_what_is_stuck_hides_nothing_behind_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, to_queue: str | None
) -> None:
    monkeypatch.setattr(outcome, "_PAGE", 3)
    monkeypatch.setattr(outcome, "_PAGES", 2)
    scene.side.queue("stuck")
    scene.side.fill("stuck", [b"nobody takes it"])
    # To a queue that only a plan has named, or as their own origin; the same origin without that plan is a good one.
    stuck = scene.send(
        *(due(each, origin_queue=(to_queue and ORIGIN) or "stuck") for each in range(9)), to_queue=to_queue
    )
    good = scene.send(*(due(each) for each in range(10, 13)), at=SENT + MINUTE)
    scene.look()
    report = scene.lifecycle()
    assert scene.statuses(*good) == ["resolved"] * 3
    assert scene.statuses(*stuck) == ["processing"] * 9
    assert report["warnings"][0].startswith("9 sent message(s) to 'stuck' are not resolved: queue 'stuck': 1 ready")


def test_a_source_queue_that_nobody_looks_at_hides_nothing_behind_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcome, "_PAGE", 3)
    monkeypatch.setattr(outcome, "_PAGES", 2)
    scene.send(*(due(each, source_queue="renamed") for each in range(9)))
    good = scene.send(due(10), at=SENT + MINUTE)
    scene.look()
    scene.lifecycle()
    assert scene.statuses(*good) == ["resolved"]


def test_an_ingest_of_a_queue_that_has_nothing_to_do_with_it_holds_nothing_up(scene: Scene) -> None:
    """It was one of the last 300, and nobody has looked into that queue again."""
    scene.side.queue("elsewhere")
    scene.look("foreign.dlq", at=SENT - timedelta(days=1))
    (own,) = scene.send(due(1))
    (moved,) = scene.send(due(2), to_queue="elsewhere")
    (home,) = scene.send(due(3), to_queue=ORIGIN)
    (foreign,) = scene.send(due(4, source_queue="foreign.dlq"))
    (head,) = scene.send(due(5, source_queue=ORIGIN))
    scene.look()
    report = scene.lifecycle()
    assert scene.statuses(own, moved, home, head, foreign) == ["resolved"] * 4 + ["processing"]
    assert "no ingest that saw 'foreign.dlq' empty has begun since" in report["warnings"][0]


def test_many_drains_since_the_last_ingest_hide_none_before_it(scene: Scene) -> None:
    (row_id,) = scene.send(due(1))
    scene.look()
    drain = {"job": "drain", "outcome": "ok", "stopped_by": "empty", "emptied": [*Ladder().queue_names], "report": {}}
    later = (LOOKED + timedelta(hours=1, seconds=each) for each in range(320))
    with writing(scene.engine) as connection:
        connection.execute(insert(RUNS), [drain | {"started_at": at, "ended_at": at + MINUTE} for at in later])
    scene.lifecycle()
    assert scene.statuses(row_id) == ["resolved"]


def test_a_success_of_whatever_was_sent_since_closes_the_circuit_breaker(scene: Scene) -> None:
    def breaker(origin: str, minutes: int) -> dict[str, Any]:
        counts = dict.fromkeys(("sent", "failed", "sent_before", "failed_before"), 0)
        return {"origin": origin, "phase": "open", "since": SENT + minutes * MINUTE, "updated_at": SENT, **counts}

    for name in ("since", "before", "other"):
        scene.side.queue(name)
    with writing(scene.engine) as connection:
        states = [breaker("since", -1), breaker("before", 1), breaker("other", -1)]
        connection.execute(insert(BREAKERS), states)
    ids = scene.send(due(1, origin_queue="since"), due(2, origin_queue="before"))
    ids += scene.send(due(3, origin_queue="other"), to_queue=ORIGIN)
    scene.look()
    scene.lifecycle()
    assert scene.statuses(*ids) == ["resolved"] * 3
    with reading(scene.engine) as connection:
        phases = {row.origin: str(row.phase) for row in connection.execute(select(BREAKERS))}
    assert phases == {"since": "closed", "before": "open", "other": "open"}


def test_an_empty_quorum_queue_without_consumers_counts_only_if_it_can_be_read(
    scene: Scene, management: Management
) -> None:
    for name in ("quorum", "theirs"):
        scene.side.queue(name, "quorum")
    ids = scene.send(due(1, origin_queue="quorum"), due(2, origin_queue="theirs"))
    scene.look()
    user = f"reader of {management.vhost}"
    management.put(f"users/{quoted(user)}", {"password": "p", "tags": ""})
    try:
        rights = {"configure": ".*", "write": ".*", "read": "^quorum$"}
        management.put(f"permissions/{quoted(management.vhost)}/{quoted(user)}", rights)
        login = scene.urls[0].replace("guest:guest@", f"{quoted(user)}:p@")
        assert scene.lifecycle(broker_url=login)["counts"]["resolved"] == 1
    finally:
        management.delete(f"users/{quoted(user)}")
    assert scene.statuses(*ids) == ["resolved", "processing"]
    scene.look()
    assert scene.lifecycle()["counts"]["resolved"] == 1


def test_what_delayed_retry_hides_in_a_dead_letter_queue_may_be_what_was_sent(
    broker43_url: str, management43: Management, sqlite_url: str
) -> None:
    scene = Scene(broker43_url, sqlite_url)
    api = "http://guest:guest@{}:{}".format(*management43._address)
    hidden: dict[str, object] = {
        "delayed_retry_type": "all",
        "delayed_retry_min": 600_000,
        "delayed_retry_max": 600_000,
    }
    scene.side.queue(ORIGIN, "quorum")
    scene.side.queue("dlq-queue", "quorum", **hidden)
    scene.side.fill("dlq-queue", [b"put back by a run that was cut"])
    method, _, _ = scene.side.channel.basic_get("dlq-queue")
    scene.side.channel.basic_nack(method.delivery_tag, requeue=True)
    assert eventually(lambda: management43.queue("dlq-queue").get("messages_delayed") == 1)
    (row,) = scene.send(due(1))
    outcome.SentAttempts(scene.engine).mark_acknowledged({row: 1}, SENT, "seen by the test")
    scene.look()
    # Nor is anything claimed by a run that the management API does not answer.
    for url in (api, "http://guest:guest@127.0.0.1:1"):
        (warning,) = scene.lifecycle(management_url=url)["warnings"]
        assert "delayed retry may hide it in queue '" in warning
        assert scene.statuses(row) == ["processing"]
    scene.side.channel.queue_delete("dlq-queue")
    scene.side.queue("dlq-queue", "quorum", **hidden)

    def is_resolved() -> bool:
        scene.look(at=datetime.now(UTC))  # a drain and an ingest after each reading
        scene.lifecycle(management_url=api)
        return scene.statuses(row) == ["resolved"]

    assert eventually(is_resolved)  # as soon as the broker has figures of the new queue
    scene.side.close()


@pytest.mark.parametrize("queue", ["retry-queue", "dlq-queue"])
def test_what_another_run_holds_may_be_what_was_sent(
    broker_url: str, management: Management, sqlite_url: str, queue: str
) -> None:
    scene = Scene(broker_url, sqlite_url)
    api = "http://guest:guest@{}:{}".format(*management._address)
    scene.side.queue(ORIGIN)
    for name in ("retry-queue", "dlq-queue"):
        scene.side.queue(name)
    scene.side.fill(queue, [b"it came back"])
    method, _, _ = scene.side.channel.basic_get(queue)
    assert eventually(lambda: management.queue(queue).get("messages_unacknowledged") == 1)
    (row,) = scene.send(due(1))
    outcome.SentAttempts(scene.engine).mark_acknowledged({row: 1}, SENT, "seen by the test")

    def is_said() -> bool:
        scene.look()  # they saw nothing: what is held is not in a queue's depth
        (warning,) = scene.lifecycle(management_url=api)["warnings"]
        assert scene.statuses(row) == ["processing"]
        return f"queue '{queue}' holds 1 unacknowledged message(s)" in warning

    assert eventually(is_said)
    scene.look()
    (warning,) = scene.lifecycle(management_url="http://guest:guest@127.0.0.1:1")["warnings"]
    assert " may hold unacknowledged message(s) that only the management API can tell" in warning
    assert scene.statuses(row) == ["processing"]
    scene.side.channel.basic_ack(method.delivery_tag)

    def is_resolved() -> bool:
        scene.look()
        scene.lifecycle(management_url=api)
        return scene.statuses(row) == ["resolved"]

    assert eventually(is_resolved)  # as soon as the broker's figures show it
    scene.side.close()


@pytest.mark.slow
def test_a_quorum_queue_without_a_leader_is_not_taken_for_empty(work_folder: Path, sqlite_url: str) -> None:
    with RabbitNode(work_folder / "rabbitmq").start() as node:
        scene = Scene(node.url, sqlite_url)
        scene.side.queue("led", "quorum")
        scene.side.fill("led", [b"still there"])
        ids = scene.send(due(1, origin_queue="led"))
        node.evaluate("ra:stop_server(quorum_queues, {'%2F_led', node()}).")
        scene.side.wait(lambda: scene.side.depth("led") == 0)
        scene.look()
        scene.lifecycle()
        assert scene.statuses(*ids) == ["processing"]
        node.evaluate("ra:restart_server(quorum_queues, {'%2F_led', node()}).")
        scene.side.wait(lambda: scene.side.depth("led") == 1)
        scene.look()
        scene.lifecycle()
        assert scene.statuses(*ids) == ["processing"]
        scene.side.empty("led")
        scene.look()
        scene.lifecycle()
        assert scene.statuses(*ids) == ["resolved"]
        scene.side.close()
