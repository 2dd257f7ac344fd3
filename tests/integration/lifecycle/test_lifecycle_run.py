"""One lifecycle run on a real broker and both databases: its bounds, its report, and rows that cannot be sent."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
import rawamqp
from dead_rows import NOW, add, begin_attempts, store_at
from lifecycle_rows import ORIGIN, copies, due, fill, worker
from program import HANGS_AFTER
from rawamqp import Peer
from sqlalchemy import event, func, insert, select, text, update

from dlqbatch import jobs, settings
from dlqbatch.amqp.retry_headers import Origin
from dlqbatch.lifecycle import attempts, leases
from dlqbatch.lifecycle.outcome_rows import SentAttempts
from dlqbatch.monitor.alerts import Alerts
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.tables import ATTEMPTS, MESSAGES, PLAN_ITEMS, PLANS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy import Engine

    from dlqbatch.lifecycle.strategy import Claimed


class Scene:
    def __init__(self, broker_url: str, database_url: str, peer: Peer) -> None:
        self.engine: Engine = store_at(database_url)
        self.urls = (broker_url, database_url)
        self.peer = peer

    def run(self, *, dry_run: bool = False, **changes: str) -> dict[str, Any]:
        given = {"broker_url": self.urls[0], "database_url": self.urls[1]} | changes
        loaded = settings.load(given, {"DLQBATCH_CONFIG": "/dev/null"})
        report = jobs.run("lifecycle", loaded, jobs.RunOptions(dry_run=dry_run)).as_dict()
        counts = {name: number for name, number in report["counts"].items() if number}
        assert counts.get("got", 0) == sum(counts.get(name, 0) for name in ("sent", "rescheduled", "manual", "left"))
        return report | {"counts": counts}

    def statuses(self) -> dict[str, int]:
        with reading(self.engine) as connection:
            found = connection.execute(select(MESSAGES.c.status, func.count()).group_by(MESSAGES.c.status))
            return {str(status): number for status, number in found}

    def attempts(self) -> int:
        with reading(self.engine) as connection:
            return int(connection.scalar(select(func.count()).select_from(ATTEMPTS)) or 0)


@pytest.fixture(params=["postgresql", "sqlite"])
def scene(request: pytest.FixtureRequest, broker_url: str) -> Iterator[Scene]:
    url = str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param]))
    with Peer(broker_url) as peer:
        peer.queue(ORIGIN, {})
        yield Scene(broker_url, url, peer)


def test_never_more_than_the_bound_is_taken(scene: Scene) -> None:
    fill(scene.engine, 250)
    report = scene.run(max_messages="120")
    assert (report["outcome"], report["stopped_by"], report["counts"]) == ("ok", "messages", {"got": 120, "sent": 120})
    assert scene.statuses() == {"pending": 130, "processing": 120}
    report = scene.run()
    assert (report["stopped_by"], report["counts"]) == ("empty", {"got": 130, "sent": 130})
    assert copies(scene.urls[0]) == {b"%d" % each: 1 for each in range(250)}


def test_a_lease_that_ends_while_its_message_is_on_its_way_counts_and_sends_nothing_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker may take longer to confirm than a lease lasts; then a run meets its own rows among the expired ones."""
    long_ago = NOW.replace(year=2021)
    fill(scene.engine, 600)
    for _ in range(6):
        leases.claim(scene.engine, "died", long_ago)
    take_over = leases.take_over

    def after_the_lease(*arguments: Any) -> Sequence[Claimed]:
        with writing(scene.engine) as connection:
            connection.execute(update(MESSAGES).where(MESSAGES.c.lease_until.is_not(None)).values(lease_until=long_ago))
        return take_over(*arguments)

    monkeypatch.setattr(leases, "take_over", after_the_lease)
    report = scene.run(max_messages="1000")
    assert (report["outcome"], report["counts"], report["reasons"]) == ("ok", {"got": 600, "sent": 600}, {}), report
    assert copies(scene.urls[0]) == {b"%d" % each: 1 for each in range(600)}


def test_what_a_bound_leaves_unreached_is_as_it_was_before(scene: Scene) -> None:
    add(scene.engine, *(due(each, body=b"%020d" % each) for each in range(100)), at=NOW)
    report = scene.run(max_bytes="200")
    counts, reasons = report["counts"], report["reasons"]
    assert (report["outcome"], report["stopped_by"]) == ("ok", "bytes")
    assert 10 <= counts["sent"] < 100
    assert reasons == {"not-reached": 100 - counts["sent"]}
    assert scene.statuses() == {"pending": 100 - counts["sent"], "processing": counts["sent"]}
    assert scene.attempts() == counts["sent"]
    assert scene.run()["counts"]["sent"] == 100 - counts["sent"]


def test_rows_that_cannot_be_sent_stop_nobody_and_do_not_come_again(scene: Scene) -> None:
    """Bytes that are no properties, an origin that is gone, and headers that fill a frame, among 20 good ones."""
    fill(scene.engine, 20)
    large = rawamqp.properties(
        [
            (b"dlqbatch-id", rawamqp.text("large")),
            (b"dlqbatch-origin-queue", rawamqp.text(ORIGIN)),
            (b"dlqbatch-origin-key", rawamqp.text("k")),
            (b"theirs", rawamqp.text("x" * (rawamqp.PROPERTIES_MAX - 60))),
        ]
    )
    gone = [(b"dlqbatch-origin-queue", rawamqp.text("gone")), (b"dlqbatch-origin-key", rawamqp.text("k"))]
    add(
        scene.engine,
        due(100, properties=b"", priority=9),
        due(101, properties=b"\xff\xff\xff", priority=9),
        due(102, properties=large, priority=9),
        due(103, properties=rawamqp.properties(gone), priority=9),
        at=NOW,
    )
    dry = scene.run(dry_run=True)
    assert dry["counts"] == {"got": 24, "sent": 20, "manual": 4}
    assert scene.statuses() == {"pending": 24}
    report = scene.run()
    assert report["counts"] == {"got": 24, "sent": 20, "manual": 4}
    assert report["reasons"] == {"headers-too-large": 1, "origin-gone": 1, "origin-unknown": 2} == dry["reasons"]
    assert scene.statuses() == {"processing": 20, "manual": 4}
    assert scene.run()["counts"] == {}


def test_without_rules_everything_is_left_to_a_person(scene: Scene) -> None:
    fill(scene.engine, 3)
    with writing(scene.engine) as connection:
        connection.execute(text("DELETE FROM dlq_rules"))
    report = scene.run()
    assert (report["counts"], report["reasons"]) == ({"got": 3, "manual": 3}, {"unknown": 3})
    assert scene.peer.depth(ORIGIN) == 0


def test_several_workers_at_once_send_each_row_once(scene: Scene) -> None:
    fill(scene.engine, 600)
    program = worker(*scene.urls)
    workers = [program.start() for _ in range(3)]
    for one in workers:
        output, errors = one.communicate(timeout=HANGS_AFTER)
        assert one.returncode == 0, output + errors
    assert copies(scene.urls[0]) == Counter(b"%d" % each for each in range(600))
    assert scene.statuses() == {"processing": 600}


def test_what_an_aborted_plan_held_is_given_back_without_an_outcome(scene: Scene) -> None:
    add(scene.engine, *(due(each) for each in range(2)), at=NOW.replace(year=2020))
    long_ago = NOW.replace(year=2021)
    tokens = {each.row_id: each.token for each in leases.claim(scene.engine, "died", long_ago, reason="replay")}
    held = begin_attempts(scene.engine, tokens, None, "died", long_ago)
    with writing(scene.engine) as connection:
        plan = {"hash": "h", "state": "aborted", "actor": "ann", "reason": "r", "filters": {}, "size": 2, "risks": []}
        plan |= dict.fromkeys(("state_since", "created_at"), long_ago)
        plan_id = connection.execute(insert(PLANS).values(plan).returning(PLANS.c.id)).scalar_one()
        seen = {"plan_id": plan_id, "seen_updated_at": long_ago, "state": "waiting"}
        seen["seen_status"] = "manual"
        items = [seen | {"place": row_id, "message_id": row_id, "attempt": number} for row_id, number in held.items()]
        connection.execute(insert(PLAN_ITEMS), items)
        connection.execute(update(MESSAGES).values(plan_id=plan_id))
    scene.run()
    assert scene.statuses() == {"manual": 2}
    assert Alerts(scene.engine).measure(datetime.now(UTC)).outcomes["manual"] == 0


def test_a_retry_that_a_plan_sent_elsewhere_is_looked_for_there(scene: Scene) -> None:
    fill(scene.engine, 2)
    records = leases.claim(scene.engine, "w", NOW)
    numbers = begin_attempts(scene.engine, {each.row_id: each.token for each in records}, None, "w", NOW)
    attempts.mark_sent(scene.engine, numbers, NOW)
    with writing(scene.engine) as connection:
        plan = connection.execute(
            insert(PLANS)
            .values(
                hash="h",
                state="done",
                state_since=NOW,
                created_at=NOW,
                actor="ann",
                reason="r",
                filters={},
                to_queue="elsewhere",
                size=1,
                risks=[],
            )
            .returning(PLANS.c.id)
        ).scalar_one()
        item = {"plan_id": plan, "place": 1, "message_id": records[0].row_id, "seen_status": "pending"}
        connection.execute(
            insert(PLAN_ITEMS).values(**item, seen_updated_at=NOW, state="sent", attempt=numbers[records[0].row_id])
        )
    found = SentAttempts(scene.engine).sent_before(NOW + timedelta(seconds=1), 10)
    assert {each.row_id: each.sent_to for each in found} == {
        records[0].row_id: Origin("elsewhere", None, ""),
        records[1].row_id: Origin(ORIGIN, "", "orders.created"),
    }


def test_no_query_of_a_run_walks_the_attempts(database_url: str) -> None:
    """Those under observation are few among all that ever were."""
    engine = store_at(database_url)
    fill(engine, 20)
    with writing(engine) as connection:
        ids = connection.scalars(select(MESSAGES.c.id)).all()
        history = [
            {"message_id": row_id, "number": n, "worker": "w", "created_at": NOW, "sent_at": NOW, "closed_at": NOW}
            for row_id in ids
            for n in range(1, 501)
        ]
        connection.execute(insert(ATTEMPTS).values(outcome="failed"), history)
        connection.execute(text("ANALYZE dlq_attempts"))
    asked: list[tuple[str, Any]] = []
    event.listen(engine, "before_cursor_execute", lambda *call: asked.append((call[2], call[3])))
    assert SentAttempts(engine).sent_before(NOW, 10) == []
    assert (
        SentAttempts(engine).sent_before(
            NOW, 10, (NOW, 1), {(0, "stuck", "", "k", "dlq-queue"), (7, "", "e", "k", "d")}
        )
        == []
    )
    with engine.connect() as connection:
        for statement, parameters in [each for each in asked if "dlq_attempts" in each[0]]:
            plan = "\n".join(connection.exec_driver_sql(f"EXPLAIN {statement}", parameters).scalars())
            assert "dlq_attempts_" in plan
            assert "Seq Scan on dlq_attempts" not in plan
