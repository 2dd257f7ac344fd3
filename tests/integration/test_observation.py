"""What becomes of a retry that was sent and stayed away: by the broker's word on its origin and the log of runs."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from broker_side import Side
from dead_rows import NOW, add, store_at
from lifecycle_rows import ORIGIN, due
from sqlalchemy import insert, select

from dlqbatch import settings, wiring
from dlqbatch.deadstore import attempts
from dlqbatch.deadstore.claim import claim
from dlqbatch.deadstore.engine import reading, writing
from dlqbatch.deadstore.run_log import RunRecord, record
from dlqbatch.deadstore.tables import ATTEMPTS, MESSAGES, PLAN_ITEMS, PLANS, RUNS, TRANSITIONS
from dlqbatch.runs import observation
from dlqbatch.topology.ladder import Ladder
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
        numbers = attempts.begin_attempts(self.engine, tokens, None, "w", at)
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
        return wiring.run("lifecycle", loaded, wiring.Occasion()).as_dict()

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
    assert scene.statuses(*ids) == ["resolved", "manual", "resolved", "manual"]
    assert (report["counts"]["got"], report["counts"]["resolved"]) == (0, 2)
    assert report["warnings"][0].startswith("2 sent message(s) are left to a person")
    assert scene.outcomes() == ["succeeded", "abandoned", "succeeded", "abandoned"]
    start, actor, reason = scene.last_entry(ids[1])
    assert (start, actor) == ("processing", "lifecycle")
    assert reason.startswith("attempt 1 stayed away, and 'gone' is gone")
    assert "warnings" not in scene.lifecycle()


def test_an_origin_that_cannot_be_looked_at_keeps_what_was_sent(scene: Scene) -> None:
    scene.side.channel.queue_declare("mine", exclusive=True)
    ids = scene.send(due(1, origin_queue="mine"))
    scene.look()
    assert "stay under observation" in scene.lifecycle()["warnings"][0]
    assert scene.statuses(*ids) == ["processing"]


@pytest.mark.parametrize("to_queue", [None, "stuck"])
def test_a_page_of_what_is_stuck_hides_nothing_behind_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, to_queue: str | None
) -> None:
    monkeypatch.setattr(observation, "_AT_ONCE", 3)
    monkeypatch.setattr(observation, "_PAGES", 2)
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
    assert report["warnings"][0].startswith("at least 3 sent message(s) stay under observation")


def test_a_source_queue_that_nobody_looks_at_hides_nothing_behind_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observation, "_AT_ONCE", 3)
    monkeypatch.setattr(observation, "_PAGES", 2)
    scene.send(*(due(each, source_queue="renamed") for each in range(9)))
    good = scene.send(due(10), at=SENT + MINUTE)
    scene.look()
    scene.lifecycle()
    assert scene.statuses(*good) == ["resolved"]


def test_what_was_sent_elsewhere_is_looked_for_in_every_queue_that_is_ingested(scene: Scene) -> None:
    scene.side.queue("elsewhere")
    scene.look("elsewhere.dlq", at=SENT - timedelta(days=1))
    (own,) = scene.send(due(1))
    (moved,) = scene.send(due(2), to_queue="elsewhere")
    (home,) = scene.send(due(3), to_queue=ORIGIN)
    scene.look()
    scene.lifecycle()
    assert scene.statuses(own, moved, home) == ["resolved", "processing", "resolved"]
    scene.look("elsewhere.dlq", at=LOOKED + timedelta(hours=1))
    scene.lifecycle()
    assert scene.statuses(moved) == ["resolved"]


def test_many_drains_since_the_last_ingest_hide_none_before_it(scene: Scene) -> None:
    (row_id,) = scene.send(due(1))
    scene.look()
    drain = {"job": "drain", "outcome": "ok", "stopped_by": "empty", "emptied": [*Ladder().queue_names], "report": {}}
    later = (LOOKED + timedelta(hours=1, seconds=each) for each in range(320))
    with writing(scene.engine) as connection:
        connection.execute(insert(RUNS), [drain | {"started_at": at, "ended_at": at + MINUTE} for at in later])
    scene.lifecycle()
    assert scene.statuses(row_id) == ["resolved"]


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


@pytest.mark.slow
def test_a_quorum_queue_without_a_leader_is_not_taken_for_empty(work_folder: Path, sqlite_url: str) -> None:
    with RabbitNode(work_folder / "rabbitmq").start() as node:
        scene = Scene(node.url, sqlite_url)
        scene.side.queue("led", "quorum")
        scene.side.fill("led", [b"still there"])
        ids = scene.send(due(1, origin_queue="led"))
        node.control("eval", "ra:stop_server(quorum_queues, {'%2F_led', node()}).")
        scene.side.wait(lambda: scene.side.depth("led") == 0)
        scene.look()
        scene.lifecycle()
        assert scene.statuses(*ids) == ["processing"]
        node.control("eval", "ra:restart_server(quorum_queues, {'%2F_led', node()}).")
        scene.side.wait(lambda: scene.side.depth("led") == 1)
        scene.look()
        scene.lifecycle()
        assert scene.statuses(*ids) == ["processing"]
        scene.side.empty("led")
        scene.look()
        scene.lifecycle()
        assert scene.statuses(*ids) == ["resolved"]
        scene.side.close()
