"""Alerts in the database: fired once, resolved once, told until somebody has heard, however many workers there are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Barrier
from typing import TYPE_CHECKING, Any

import pytest
from dead_rows import NOW, add, row, store_at
from hooks import OK, hang, hook, status
from sqlalchemy import func, select, update

from dlqbatch.cloud.webhook import Webhook
from dlqbatch.deadstore.alerts import MOST_TRIES, SAMPLED, TURN, Alerts
from dlqbatch.deadstore.engine import reading, writing
from dlqbatch.deadstore.tables import ALERTS, MESSAGES
from dlqbatch.policy.alerts import BACKLOG, NEW_GROUP, Notice, Thresholds, of_group
from dlqbatch.policy.lifecycle import Status
from dlqbatch.runs.monitor import Monitor

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from sqlalchemy import Engine

    from dlqbatch.runs.report import Report

MINUTE = timedelta(minutes=1)
WORKERS = {"postgresql": 8, "sqlite": 4}


@pytest.fixture(params=["postgresql", "sqlite"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return store_at(str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param])))


@dataclass
class Listener:
    """Takes notices, or says why not."""

    why: str | None = None
    heard: list[tuple[str, str, str]] = field(default_factory=list)
    calls: int = 0

    def __call__(self, notices: Sequence[Notice]) -> str | None:
        self.calls += 1
        if self.why is None:
            self.heard += [(notice.name, notice.subject, notice.state) for notice in notices]
        return self.why


def run(engine: Engine, tell: Any = None, now: datetime = NOW, **limits: Any) -> Report:
    book = Alerts(engine)
    return Monitor(book.measure, book, Thresholds(**limits), lambda: now, tell).run()


def numbers(report: Report) -> tuple[int, int, int]:
    told: Any = report.as_dict()["alerts"]
    return tuple(told["numbers"][name] for name in ("fired", "resolved", "active"))  # type: ignore[return-value]


def group(number: int) -> str:
    return f"{number:016x}"


def waiting(engine: Engine, *groups: int, **columns: Any) -> list[int]:
    return add(engine, *(row(status=Status.MANUAL, fingerprint=group(number), **columns) for number in groups))


def settle(engine: Engine, *row_ids: int, to: Status = Status.ARCHIVED) -> None:
    with writing(engine) as connection:
        connection.execute(update(MESSAGES).where(MESSAGES.c.id.in_(row_ids)).values(status=to))


def test_an_alert_fires_once_and_ends_once_and_may_fire_again(engine: Engine) -> None:
    ids = add(engine, *(row() for _ in range(3)))
    listener = Listener()
    expected = [(1, 0, 1), (0, 0, 1), (0, 1, 0), (0, 0, 0), (1, 0, 1)]
    steps = [Status.PENDING, Status.PENDING, Status.RESOLVED, Status.RESOLVED, Status.PENDING]
    for minute, (to, wanted) in enumerate(zip(steps, expected, strict=True)):
        settle(engine, *ids, to=to)
        assert numbers(run(engine, listener, NOW + minute * MINUTE, backlog=2)) == wanted
    assert listener.heard == [(BACKLOG, "", "fired"), (BACKLOG, "", "resolved"), (BACKLOG, "", "fired")]
    assert listener.calls == 3


@pytest.mark.parametrize("round_", range(3))
def test_many_workers_at_once_fire_end_and_tell_once(engine: Engine, round_: int) -> None:
    ids = waiting(engine, *range(30))
    listener, workers = Listener(), WORKERS[engine.dialect.name]
    for now, at_the_end in ((NOW, 31), (NOW + 2 * MINUTE, 0)):
        start = Barrier(workers)

        def work(_: int, now: datetime = now, start: Barrier = start) -> tuple[int, int, int]:
            start.wait(30)
            return numbers(run(engine, listener, now, backlog=1))

        with ThreadPoolExecutor(workers) as pool:
            found = list(pool.map(work, range(workers)))
        assert sum(fired for fired, _, _ in found) == at_the_end
        assert sum(resolved for _, resolved, _ in found) == 31 - at_the_end
        run(engine, listener, now + MINUTE, backlog=1)  # what was left to one that was just done telling
        settle(engine, *ids)
    names = [(BACKLOG, ""), *((NEW_GROUP, group(number)) for number in range(30))]
    assert sorted(listener.heard) == sorted((*name, state) for name in names for state in ("fired", "resolved"))


def test_a_group_is_told_once_ever(engine: Engine) -> None:
    (first,) = waiting(engine, 7, error_type="TimeoutError", error_message="no answer\n at \x1b[31mamqp://u:pw@host/")
    listener = Listener()
    report: Any = run(engine, listener).as_dict()
    (fired,) = report["alerts"]["fired"]
    assert fired["summary"] == (
        f"new group {group(7)}: 1 message needs a person, such as message {first}: TimeoutError: "
        rf"no answer at \x1b[31mamqp://u:***@host/. Look: dlqbatch messages list --group {group(7)}"
    )
    waiting(engine, 7)
    assert numbers(run(engine, listener)) == (0, 0, 1)
    settle(engine, first)
    assert numbers(run(engine, listener)) == (0, 0, 1)  # one of it still waits
    settle(engine, first + 1, to=Status.RESOLVED)
    assert numbers(run(engine, listener)) == (0, 1, 0)
    settle(engine, first, to=Status.FAILED)
    assert numbers(run(engine, listener)) == (0, 0, 0)
    assert listener.heard == [(NEW_GROUP, group(7), "fired"), (NEW_GROUP, group(7), "resolved")]


def test_a_worker_that_looked_before_the_others_were_done_does_not_tell_again(engine: Engine) -> None:
    ids, book = waiting(engine, 1), Alerts(engine)
    seen = [of_group(new) for new in book.new_groups()]
    assert len(book.settle((), seen, NOW, to_tell=True).fired) == 1
    assert book.settle((), seen, NOW, to_tell=True).fired == ()
    settle(engine, *ids)
    assert len(book.settle((), seen, NOW, to_tell=True).resolved) == 1
    assert book.settle((), seen, NOW, to_tell=True).fired == ()


def test_what_no_person_is_needed_for_is_no_new_group(engine: Engine) -> None:
    add(engine, row(fingerprint=group(1)))
    assert numbers(run(engine)) == (0, 0, 0)
    waiting(engine, 2)
    assert numbers(run(engine, new_groups=False)) == (0, 0, 0)
    assert numbers(run(engine)) == (1, 0, 1)


def test_a_first_run_with_many_groups_is_one_call_that_names_the_largest(engine: Engine) -> None:
    waiting(engine, *range(1, 500), *[77] * 3, error_message="sample")
    with hook(OK) as other:
        report = run(engine, Webhook(other.url).tell, ingestion_per_minute=1_000)
        assert numbers(report) == (499, 0, 499)
        assert numbers(run(engine, Webhook(other.url).tell, ingestion_per_minute=1_000)) == (0, 0, 499)
    (told,) = other.told
    assert (len(told["alerts"]), told["more"]) == (SAMPLED, 499 - SAMPLED)
    assert told["alerts"][0]["subject"] == group(77)
    assert all("sample" in alert["summary"] for alert in told["alerts"])
    shown: Any = report.as_dict()["alerts"]
    assert (len(shown["fired"]), len(shown["active"])) == (SAMPLED, SAMPLED)


def test_a_dead_webhook_stops_nothing_and_is_tried_again_by_the_next_run(engine: Engine) -> None:
    waiting(engine, 1)
    with hook(status(500)) as other:
        webhook = Webhook(other.url)
        report = run(engine, webhook.tell)
        assert (report.outcome, numbers(report)) == ("partial", (1, 0, 1))
        (warning,) = report.warnings
        assert warning.startswith("the webhook at http://127.0.0.1/*** was not told: it answered 500 Internal Server")
        assert warning.endswith("; the next run tells them again")
        assert len(other.requests) == 3
        other.answers[:] = [OK]
        assert run(engine, webhook.tell, NOW + MINUTE).warnings == ()
        assert run(engine, webhook.tell, NOW + 2 * MINUTE).warnings == ()
    assert len(other.requests) == 4
    assert [one["alerts"][0]["subject"] for one in other.told] == [group(1)] * 4


def test_what_fired_and_ended_before_anybody_heard_is_told_as_over(engine: Engine) -> None:
    ids = waiting(engine, 1)
    deaf, listener = Listener("deaf"), Listener()
    run(engine, deaf)
    settle(engine, *ids)
    run(engine, deaf)
    run(engine, listener)
    run(engine, listener)
    assert listener.heard == [(NEW_GROUP, group(1), "resolved")]


def test_an_alert_that_ends_while_it_is_told_is_told_as_over_afterwards(engine: Engine) -> None:
    ids = waiting(engine, 1)
    listener = Listener()

    def tell(notices: Sequence[Notice]) -> str | None:
        if listener.calls == 0:
            settle(engine, *ids)
            other = Listener()
            assert numbers(run(engine, other)) == (0, 1, 0)
            assert other.calls == 0  # one at a time tells
        return listener(notices)

    run(engine, tell)
    assert listener.heard == [(NEW_GROUP, group(1), "fired"), (NEW_GROUP, group(1), "resolved")]


def test_a_worker_that_died_while_telling_is_followed_by_another(engine: Engine) -> None:
    waiting(engine, 1)

    def die(_: Sequence[Notice]) -> str | None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(engine, die)
    listener = Listener()
    run(engine, listener, NOW + TURN / 2)
    assert listener.heard == []  # it may be telling still
    run(engine, listener, NOW + TURN)
    assert listener.heard == [(NEW_GROUP, group(1), "fired")]


def test_tries_are_counted_and_come_to_an_end(engine: Engine) -> None:
    waiting(engine, 1)
    deaf = Listener("deaf")
    run(engine, deaf)
    with writing(engine) as connection:
        connection.execute(update(ALERTS).where(ALERTS.c.name == NEW_GROUP).values(tries=MOST_TRIES - 1))
    for _ in range(3):
        run(engine, deaf)
    assert deaf.calls == 2


def test_without_a_webhook_nobody_is_told_later_of_what_is_old(engine: Engine) -> None:
    waiting(engine, 1)
    run(engine)
    listener = Listener()
    run(engine, listener)
    assert listener.calls == 0


def test_no_transaction_is_open_while_the_webhook_hangs(engine: Engine) -> None:
    waiting(engine, 1)
    with hook(hang) as other:

        def tell(notices: Sequence[Notice]) -> str | None:
            with ThreadPoolExecutor(1) as pool:
                calling = pool.submit(Webhook(other.url, timeout=1.5, total=1.5).tell, notices)
                waiting(engine, 2)
                assert numbers(run(engine)) == (1, 0, 2)
                assert not calling.done()
                return calling.result()

        assert run(engine, tell).warnings


def test_a_dry_run_says_the_same_and_writes_nothing(engine: Engine) -> None:
    waiting(engine, 1, 2)
    listener, book = Listener(), Alerts(engine)
    dry = Monitor(book.measure, book, Thresholds(), lambda: NOW, listener, dry_run=True)
    assert numbers(dry.run()) == (2, 0, 0)
    assert numbers(dry.run()) == (2, 0, 0)
    assert listener.calls == 0
    with reading(engine) as connection:
        assert connection.scalar(select(func.count()).select_from(ALERTS)) == 0


def test_active_alerts_are_the_gravest_first(engine: Engine) -> None:
    waiting(engine, 1)
    run(engine, Listener("deaf"), backlog=1)
    waiting(engine, 1)
    run(engine, Listener("deaf"), NOW + MINUTE, backlog=1)
    assert [notice.name for notice in Alerts(engine).active()] == [BACKLOG, NEW_GROUP]
