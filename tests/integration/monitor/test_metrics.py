"""The metrics are what happened, whoever did it and whoever asks; and asking stays cheap with many rows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from dead_rows import NOW, add, begin_attempts, fill, lock, row, store_at
from query_plans import statements_of, walk
from sqlalchemy import insert, select, text, update

from dlqbatch.lifecycle.attempts import close_attempts, mark_sent
from dlqbatch.lifecycle.leases import claim
from dlqbatch.monitor.alerts import Alerts
from dlqbatch.monitor.measure import arrivals_by_hour, measure
from dlqbatch.monitor.metrics import EventFigures, Metrics
from dlqbatch.retain.rows import Keep
from dlqbatch.store import journal as states
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.run_log import RunRecord, record
from dlqbatch.store.states import Phase, Status, Strategy
from dlqbatch.store.tables import ATTEMPTS, BREAKERS, MESSAGES, PLAN_ITEMS, PLANS

if TYPE_CHECKING:
    from datetime import datetime

    from sqlalchemy import Engine

SECOND, MINUTE, HOUR, DAY = (timedelta(**{unit: 1}) for unit in ("seconds", "minutes", "hours", "days"))
PATHS = {
    Status.PENDING: (),
    Status.PROCESSING: (Status.PROCESSING,),
    Status.RESOLVED: (Status.PROCESSING, Status.RESOLVED),
    Status.FAILED: (Status.PROCESSING, Status.FAILED),
    Status.MANUAL: (Status.PROCESSING, Status.MANUAL),
}


@pytest.fixture(params=["postgresql", "sqlite"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param]))


@pytest.fixture
def engine(url: str) -> Engine:
    return store_at(url)


def look(engine: Engine, now: datetime = NOW) -> Metrics:
    return Alerts(engine).measure(now)


def bring(
    engine: Engine, status: Status, *, born: datetime, at: datetime, actor: str = "lifecycle", **columns: Any
) -> int:
    """A message that came in at `born` and whose moves to that state all happened at `at`."""
    (row_id,) = add(engine, row(**columns), at=born)
    before, token = Status.PENDING, None
    with writing(engine) as connection:
        for step in PATHS[status]:
            held = lock() if step is Status.PROCESSING else {}
            assert states.move(connection, row_id, before, step, token, at, actor, "test", **held)
            before, token = step, "t" if held else None
    return row_id


def test_an_empty_store_measures_nothing_and_knows_no_rate(engine: Engine) -> None:
    found = look(engine)
    assert set(found.states) == {status.value for status in Status}
    assert (sum(found.states.values()), found.backlog, found.due, found.ingested_last_hour) == (0, 0, 0, 0)
    assert (found.resolution_rate, found.retry_success, found.replay_success, found.dead_letter_rate) == (None,) * 4
    assert (found.seconds_in_store, found.oldest_waiting, found.next_due) == (None, None, None)
    assert (found.errors.named, found.events, found.last_runs, found.runs) == ((), (), (), {})


def test_the_backlog_is_what_is_not_over_yet(engine: Engine) -> None:
    for number, status in enumerate(PATHS, start=1):
        for _ in range(number):
            bring(engine, status, born=NOW - DAY, at=NOW - DAY)
    found = look(engine)
    assert found.states == {
        "pending": 1,
        "processing": 2,
        "resolved": 3,
        "failed": 4,
        "manual": 5,
        "archived": 0,
    }
    assert found.backlog == 1 + 2 + 4 + 5
    assert found.oldest_waiting == NOW - DAY


def test_ingestion_counts_what_an_ingest_brought_in_the_last_minute_and_hour(engine: Engine) -> None:
    for age in (SECOND, 59 * SECOND, MINUTE, 59 * MINUTE, HOUR, 5 * HOUR + MINUTE):
        add(engine, row(), row(), at=NOW - age)
    with writing(engine) as connection:
        states.arrive(connection, [row()], NOW - SECOND, "a person", "edited")
        states.note(connection, 1, NOW, "ingest", "the same message again")
    found = look(engine)
    assert (found.ingested_last_minute, found.ingested_last_hour) == (4, 8)
    with reading(engine) as connection:
        hours = arrivals_by_hour(connection, NOW)
    assert (len(hours), hours[-1], hours[-2], hours[-6], sum(hours)) == (24, 8, 2, 2, 12)


def test_every_arrival_is_counted_by_one_look(engine: Engine) -> None:
    """As a timer of 65 seconds looks; a burst may fall between the minutes before two looks, or commit late."""
    book = Alerts(engine)

    def looked(seconds: float) -> float:
        found = book.measure(NOW + seconds * SECOND)
        book.note_look(found)
        return found.ingested_per_minute

    add(engine, *(row() for _ in range(9)), at=NOW - 2 * MINUTE)
    assert looked(0) == 0, "without a look before, the last minute counts"
    add(engine, *(row() for _ in range(65)), at=NOW + 2 * SECOND)
    assert book.measure(NOW + 65 * SECOND).ingested_last_minute == 0
    assert looked(65) == pytest.approx(60)
    # Of a transaction that had begun before the last look, and ended after it.
    add(engine, *(row() for _ in range(130)), at=NOW + 60 * SECOND)
    assert looked(130) == pytest.approx(120), "130 in 65 s, none of them in the minute before"
    assert looked(195) == 0
    # Two monitors, one second apart: a few messages are no rate of a hundred.
    add(engine, *(row() for _ in range(3)), at=NOW + 195.5 * SECOND)
    assert looked(196) == 3
    # It was off for a day: what came meanwhile is no rate of now, and neither is it one of the minute.
    add(engine, *(row() for _ in range(500)), at=NOW + HOUR)
    assert looked(86_400) == 0
    assert looked(86_460) == 0
    earlier = book.measure(NOW + 90 * SECOND)
    book.note_look(earlier)
    assert book.measure(NOW + 86_461 * SECOND).ingested_per_minute == 0


def test_what_was_decided_in_the_last_hour_makes_the_resolution_rate(engine: Engine) -> None:
    for _ in range(3):
        bring(engine, Status.RESOLVED, born=NOW - 3 * HOUR, at=NOW - 59 * MINUTE)
    bring(engine, Status.FAILED, born=NOW - 2 * HOUR, at=NOW, actor="ingest")
    bring(engine, Status.MANUAL, born=NOW - 2 * HOUR, at=NOW - MINUTE)
    bring(engine, Status.RESOLVED, born=NOW - 3 * HOUR, at=NOW - HOUR)  # too long ago
    add(engine, row(status=Status.MANUAL))  # it came in so
    bring(engine, Status.MANUAL, born=NOW, at=NOW, actor="a person")  # on its way to being discarded
    found = look(engine)
    assert found.outcomes == {"resolved": 3, "failed": 1, "manual": 1}
    assert found.resolution_rate == 0.6
    assert look(engine, NOW + 2 * HOUR).resolution_rate is None


def move(engine: Engine, row_id: int, *steps: tuple[Status, Status, str], at: datetime) -> None:
    with writing(engine) as connection:
        for start, end, actor in steps:
            token, held = ("t" if start is Status.PROCESSING else None), (lock() if end is Status.PROCESSING else {})
            assert states.move(connection, row_id, start, end, token, at, actor, "test", **held)


def test_a_message_counts_once_by_its_last_outcome_and_a_late_return_takes_it_back(engine: Engine) -> None:
    """Each was taken for resolved four times, came back every time, and failed for good in the end."""
    again = [(Status.RESOLVED, Status.PENDING, "ingest"), (Status.PENDING, Status.PROCESSING, "lifecycle")]
    for _ in range(4):
        row_id = bring(engine, Status.RESOLVED, born=NOW - HOUR, at=NOW - 50 * MINUTE)
        for minutes in (40, 30, 20):
            resolved = (Status.PROCESSING, Status.RESOLVED, "lifecycle")
            move(engine, row_id, *again, resolved, at=NOW - minutes * MINUTE)
        move(engine, row_id, *again, (Status.PROCESSING, Status.FAILED, "ingest"), at=NOW - 10 * MINUTE)
    before = look(engine, NOW - 15 * MINUTE)
    assert (before.outcomes, before.resolution_rate) == ({"resolved": 4, "failed": 0, "manual": 0}, 1)
    found = look(engine)
    assert (found.outcomes, found.resolution_rate) == ({"resolved": 0, "failed": 4, "manual": 0}, 0)
    assert found.seconds_in_store == pytest.approx(50 * 60, abs=0.01)
    back = bring(engine, Status.RESOLVED, born=NOW - HOUR, at=NOW - 2 * MINUTE)
    assert look(engine).outcomes["resolved"] == 1
    move(engine, back, again[0], at=NOW - MINUTE)
    late = look(engine)
    assert (late.outcomes, late.seconds_in_store) == (found.outcomes, found.seconds_in_store)


def test_overdue_is_what_retain_should_have_taken_long_ago(engine: Engine) -> None:
    for status in (Status.RESOLVED, Status.FAILED, Status.MANUAL):
        for age in (29, 31, 33, 91, 93):
            bring(engine, status, born=NOW - age * DAY, at=NOW - age * DAY)
    reserved = bring(engine, Status.FAILED, born=NOW - 95 * DAY, at=NOW - 95 * DAY)
    with writing(engine) as connection:
        connection.execute(update(MESSAGES).where(MESSAGES.c.id == reserved).values(plan_id=7))
    keep = Keep(resolved=30 * DAY, failed=90 * DAY, archived=365 * DAY)
    found = Alerts(engine).measure(NOW, keep.before(NOW - 2 * DAY))
    assert found.overdue == {"resolved": 3, "failed": 1, "archived": 0}


def test_what_a_replay_gives_back_unsent_is_no_outcome(engine: Engine) -> None:
    """It failed or waited for a person long ago, and nothing was decided about it since."""
    bring(engine, Status.RESOLVED, born=NOW - HOUR, at=NOW - HOUR / 2)
    for actor in ("ann", "replay"):
        bring(engine, Status.FAILED, born=NOW - 9 * DAY, at=NOW - MINUTE, actor=actor)
        bring(engine, Status.MANUAL, born=NOW - 9 * DAY, at=NOW - MINUTE, actor=actor)
    found = look(engine)
    assert found.outcomes == {"resolved": 1, "failed": 0, "manual": 0}
    assert found.seconds_in_store == pytest.approx(1800, abs=0.01)


def test_the_mean_time_in_the_store_is_of_what_ended(engine: Engine) -> None:
    bring(engine, Status.RESOLVED, born=NOW - 2 * HOUR, at=NOW - 30 * MINUTE)
    bring(engine, Status.FAILED, born=NOW - 3 * HOUR, at=NOW - 30 * MINUTE, actor="ingest")
    bring(engine, Status.MANUAL, born=NOW - 9 * DAY, at=NOW - 30 * MINUTE)  # it waits
    bring(engine, Status.RESOLVED, born=NOW - 9 * DAY, at=NOW - 2 * HOUR)  # too long ago
    seconds = look(engine).seconds_in_store
    assert seconds == pytest.approx(2 * 3600, abs=0.01)
    discarded = bring(engine, Status.MANUAL, born=NOW - 4 * HOUR - 30 * MINUTE, at=NOW - 3 * HOUR)
    with writing(engine) as connection:
        at = NOW - 30 * MINUTE
        assert states.move(connection, discarded, Status.MANUAL, Status.ARCHIVED, None, at, "a person", "no use")
    assert look(engine).seconds_in_store == pytest.approx((1.5 + 2.5 + 4) / 3 * 3600, abs=0.01)


def test_errors_and_events_of_the_last_day_are_bounded(engine: Engine) -> None:
    for number in range(30):
        kinds = [row(error_type=f"E{number:02}", event=f"e.{number:02}", retry_count=2) for _ in range(31 - number)]
        add(engine, *kinds, at=NOW - HOUR)
    add(
        engine, row(error_type=None, event=None), *(row(error_type="old", event="old") for _ in range(99)), at=NOW - DAY
    )
    add(engine, *(row(error_type=None, event=None, retry_count=0) for _ in range(40)))
    found = look(engine)
    assert found.errors.named[:2] == (("unknown", 40), ("E00", 31))
    assert (len(found.errors.named), found.errors.other) == (20, sum(31 - number for number in range(19, 30)))
    assert found.events[:2] == (EventFigures("unknown", 40, 0), EventFigures("e.00", 31, 62))
    assert len(found.events) == 20


def test_errors_are_of_so_many_messages_the_newest(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlqbatch.monitor.measure.DEATHS_LOOKED_AT", 5)
    add(engine, *(row(error_type="old") for _ in range(5)), at=NOW - HOUR)
    add(engine, *(row(error_type="new") for _ in range(4)))
    assert look(engine).errors.named == (("new", 4), ("old", 1))


def attempts(engine: Engine, *outcomes: str | None, at: datetime = NOW) -> list[int]:
    ids = add(engine, *(row(next_retry_at=at - DAY) for _ in outcomes), at=at - DAY)
    tokens = {one.row_id: one.token for one in claim(engine, "w", at)}
    mark_sent(engine, begin_attempts(engine, tokens, Strategy.IMMEDIATE, "w", at), at)
    with writing(engine) as connection:
        for row_id, outcome in zip(ids, outcomes, strict=True):
            if outcome is not None:
                assert close_attempts(connection, {row_id: 1}, outcome, at)  # type: ignore[arg-type]
    return ids


def test_retries_succeed_or_fail_in_the_last_hour(engine: Engine) -> None:
    attempts(engine, "succeeded", "succeeded", "succeeded", "failed", "abandoned", None)
    attempts(engine, "failed", "failed", at=NOW - HOUR)
    found = look(engine)
    assert found.attempts == {"succeeded": 3, "failed": 1}
    assert found.retry_success == 0.75


def test_replays_are_the_attempts_that_a_plan_sent(engine: Engine) -> None:
    ids = attempts(engine, "succeeded", "failed", "succeeded", None, "failed")
    plan = {"state_since": NOW, "actor": "a person", "reason": "r", "filters": {}, "size": 5, "risks": []}
    with writing(engine) as connection:
        for number, (state, created) in enumerate([("done", NOW), ("applying", NOW - DAY), ("planned", NOW)]):
            values = {**plan, "hash": str(number), "state": state, "created_at": created}
            (plan_id,) = connection.execute(insert(PLANS).values(values).returning(PLANS.c.id)).one()
            told = [("sent", 1), ("sent", 1), ("skipped", None), ("sent", 1), ("sent", 2)]
            for place, (row_id, (item, attempt)) in enumerate(zip(ids, told, strict=True)):
                seen = {"seen_status": Status.MANUAL, "seen_updated_at": NOW, "state": item, "attempt": attempt}
                mine = {"plan_id": plan_id, "place": place, "message_id": row_id}
                # Of the second plan only one item; a plan that was not applied counts for nothing.
                if number != 1 or place == 0:
                    connection.execute(insert(PLAN_ITEMS).values(**mine, **seen))
    found = look(engine)
    # What is not known yet is told apart, and lowers no rate.
    assert found.replays == {"succeeded": 2, "failed": 1, "open": 2}
    assert found.replay_success == pytest.approx(2 / 3)


def test_due_is_what_a_worker_could_claim(engine: Engine) -> None:
    soon = NOW + 5 * MINUTE
    add(engine, *(row(next_retry_at=at) for at in (NOW - HOUR, NOW, soon, NOW + HOUR)), row(next_retry_at=None))
    add(engine, row(next_retry_at=NOW, is_due=True), row(next_retry_at=NOW - HOUR, plan_id=1))
    found = look(engine)
    assert (found.due, found.next_due) == (3, soon)
    assert len(claim(engine, "w", NOW)) == 3
    assert look(engine).due == 0


def test_breakers_that_are_not_closed_are_named(engine: Engine) -> None:
    counts = dict.fromkeys(("sent", "failed", "sent_before", "failed_before"), 1)
    with writing(engine) as connection:
        for number, phase in enumerate([Phase.OPEN, Phase.HALF_OPEN, Phase.OPEN, Phase.CLOSED]):
            values = {"origin": f"queue-{number}", "phase": phase, "since": NOW + number * MINUTE, "updated_at": NOW}
            connection.execute(insert(BREAKERS).values(**values, **counts))
    found = look(engine)
    assert found.breakers == {"open": 2, "half-open": 1}
    assert found.origins_held == ("queue-2", "queue-1", "queue-0")


def test_runs_are_added_up_and_the_last_of_each_job_is_known(url: str, engine: Engine) -> None:
    for job, age, delayed in (("drain", MINUTE, 3), ("drain", 2 * MINUTE, 6), ("drain", 2 * HOUR, 99), ("x", DAY, 1)):
        counts = {"got": delayed + 1, "delayed": delayed, "dead_lettered": 1}
        began = NOW - age
        record(url, RunRecord(job, began, began + SECOND, "ok", "empty", [], {"job": job, "counts": counts}))
    record(url, RunRecord("y", NOW, NOW, "failed", "time", [], {"counts": ["not", "ours"]}))
    found = look(engine)
    assert found.runs["drain"] == {"runs": 2, "got": 11, "delayed": 9, "dead_lettered": 2}
    assert found.dead_letter_rate == pytest.approx(2 / 11)
    assert [(run.job, run.ended_at, run.outcome, run.counts.get("delayed")) for run in found.last_runs] == [
        ("drain", NOW - MINUTE + SECOND, "ok", 3),
        ("x", NOW - DAY + SECOND, "ok", 1),
        ("y", NOW, "failed", None),
    ]


def test_queues_are_as_deep_as_somebody_has_seen_last_and_bounds_are_counted_to_the_last_other_run(
    url: str, engine: Engine
) -> None:
    def ran(job: str, age: timedelta, *, bound: bool, **left: int | None) -> None:
        queues = {name: {"found": 50, "left": depth} for name, depth in left.items()}
        began = NOW - age
        told = {"hit_bound": bound, "queues": queues}
        record(url, RunRecord(job, began, began + SECOND, "ok", "messages", [], told))

    ran("drain", 2 * MINUTE, bound=True, a=3)
    ran("drain", MINUTE, bound=True, a=4)
    ran("drain", 3 * MINUTE, bound=False, a=99)
    ran("drain", 4 * MINUTE, bound=True, a=99)
    ran("ingest", 2 * DAY, bound=True, b=7, c=None)  # it does not run any more, and had the last word
    ran("check", SECOND, bound=True, a=0)
    found = look(engine)
    assert found.bounds_in_a_row == {"drain": 2, "ingest": 1}
    ended = SECOND
    assert [(one.queue, one.depth, one.at) for one in found.queues] == [
        ("c", 50, NOW - 2 * DAY),
        ("b", 7, NOW - 2 * DAY + ended),
        ("a", 4, NOW - MINUTE + ended),
    ]
    assert found.queues[2].deep_since(3) == NOW - MINUTE + ended
    assert found.queues[2].deep_since(2) == NOW - 4 * MINUTE + ended


def test_every_worker_measures_the_same(engine: Engine) -> None:
    fill(engine, 500, due=20)
    with ThreadPoolExecutor(4) as pool:
        first, *others = pool.map(lambda _: look(engine), range(4))
    assert others == [first] * 3


@pytest.mark.slow
def test_no_query_walks_a_whole_table(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    # So many more rows than a query may look at as there are with a million.
    monkeypatch.setattr("dlqbatch.monitor.measure.DEATHS_LOOKED_AT", 2_500)
    fill(engine, 50_000, due=200)
    columns = "message_id, from_status, to_status, at, actor, reason"
    moves = f"INSERT INTO dlq_transitions ({columns}) SELECT id, "
    with writing(engine) as connection:
        connection.execute(text(f"{moves} NULL, 'pending', created_at, 'ingest', 'x' FROM dlq_messages"))
        ended = "WHERE status IN ('resolved', 'failed', 'manual')"
        connection.execute(
            text(f"{moves} 'processing', status, created_at, 'lifecycle', 'x' FROM dlq_messages {ended}")
        )
        tried = select(MESSAGES.c.id, 1, text("'w'"), *[MESSAGES.c.created_at] * 3, text("'failed'"))
        names = ["message_id", "number", "worker", "created_at", "sent_at", "closed_at", "outcome"]
        connection.execute(insert(ATTEMPTS).from_select(names, tried))
        values = "'ok', 'empty', '[]', '{}' FROM dlq_messages"
        runs = "job, started_at, ended_at, outcome, stopped_by, emptied, report"
        connection.execute(text(f"INSERT INTO dlq_runs ({runs}) SELECT source_queue, created_at, created_at, {values}"))
        columns = "id, hash, state, state_since, created_at, actor, reason, filters, size, risks"
        told = "1, 'h', 'done', created_at, created_at, 'a', 'r', '{}', 1, '[]' FROM dlq_messages LIMIT 1"
        connection.execute(text(f"INSERT INTO dlq_plans ({columns}) SELECT {told}"))
        columns = "plan_id, place, message_id, seen_status, seen_updated_at, state, attempt"
        items = f"INSERT INTO dlq_plan_items ({columns}) SELECT 1, id, id, status, created_at, "
        connection.execute(text(f"{items} CASE WHEN id % 1000 = 0 THEN 'sent' ELSE 'waiting' END, 1 FROM dlq_messages"))
        connection.execute(update(MESSAGES).where(MESSAGES.c.id % 5_000 == 0).values(fingerprint="f" * 16))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE" if engine.dialect.name == "postgresql" else "ANALYZE"))
    book = Alerts(engine)
    with statements_of(engine) as seen:
        with reading(engine) as connection:
            measure(connection, NOW, Keep(30 * DAY, 90 * DAY, 365 * DAY).before(NOW))
            arrivals_by_hour(connection, NOW, hours=1)
        book.new_groups()
        book.settle((), (), NOW, receivers=["webhook"])
    assert len(seen) > 10
    walking = [plan for statement, parameters in seen if (plan := walk(engine, statement, parameters))]
    assert not walking, "\n\n".join(walking)
