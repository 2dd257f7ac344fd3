"""Alerts in the database: fired once, resolved once, told until somebody has heard, however many workers there are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Barrier
from typing import TYPE_CHECKING, Any

import pytest
from dead_rows import NOW, add, row, store_at
from program import HANGS_AFTER
from sqlalchemy import delete, func, select, update
from webhook_receiver import OK, hang, hook, status

from dlqbatch.monitor.alert_rules import BACKLOG, MOST_TRIES, TURN, Notice, Thresholds, of_group
from dlqbatch.monitor.alerts import SAMPLED, Alerts
from dlqbatch.monitor.job import Monitor
from dlqbatch.monitor.receivers import Webhook
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.states import NEW_GROUP, Status
from dlqbatch.store.tables import ALERT_RECEIVERS, ALERTS, MESSAGES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from sqlalchemy import Engine

    from dlqbatch.jobs import Report

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
        if self.calls > 1_000:
            pytest.fail("a receiver was told again and again")  # else a run would go on for ever
        if self.why is None:
            self.heard += [(notice.name, notice.subject, notice.state) for notice in notices]
        return self.why


def run(engine: Engine, tell: Any = None, now: datetime = NOW, **limits: Any) -> Report:
    return run_all(engine, {} if tell is None else {"webhook": tell}, now, **limits)


def run_all(engine: Engine, receivers: dict[str, Any], now: datetime, **limits: Any) -> Report:
    return Monitor(Alerts(engine), Thresholds(**limits), lambda: now, receivers).run()


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
            start.wait(HANGS_AFTER)
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
    assert len(book.settle((), seen, NOW, receivers=["webhook"]).fired) == 1
    assert book.settle((), seen, NOW, receivers=["webhook"]).fired == ()
    settle(engine, *ids)
    assert len(book.settle((), seen, NOW, receivers=["webhook"]).resolved) == 1
    assert book.settle((), seen, NOW, receivers=["webhook"]).fired == ()


def test_an_alert_that_stands_shows_the_figure_of_now(engine: Engine) -> None:
    add(engine, *(row() for _ in range(3)))
    run(engine, backlog=2)
    add(engine, row())
    report: Any = run(engine, now=NOW + MINUTE, backlog=2).as_dict()
    (stands,) = report["alerts"]["active"]
    assert (stands["value"], stands["summary"][:16]) == (4, "4 dead messages ")
    assert stands["fired_at"] == NOW.isoformat(timespec="seconds")


def test_what_no_person_is_needed_for_is_no_new_group(engine: Engine) -> None:
    add(engine, row(fingerprint=group(1)))
    assert numbers(run(engine)) == (0, 0, 0)
    waiting(engine, 2)
    assert numbers(run(engine, new_groups=False)) == (0, 0, 0)
    assert numbers(run(engine)) == (1, 0, 1)


def test_a_first_run_with_many_groups_is_one_call_that_names_the_largest(engine: Engine) -> None:
    waiting(engine, *range(1, 500), *[77] * 3, error_message="sample")
    with hook(OK) as other:
        report = run(engine, Webhook(other.url).send, ingestion_per_minute=1_000)
        assert numbers(report) == (499, 0, 499)
        assert numbers(run(engine, Webhook(other.url).send, ingestion_per_minute=1_000)) == (0, 0, 499)
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
        report = run(engine, webhook.send)
        assert (report.outcome, numbers(report)) == ("partial", (1, 0, 1))
        (warning,) = report.warnings
        assert warning.startswith("the webhook at http://127.0.0.1/*** was not told: it answered 500 Internal Server")
        assert warning.endswith("; it is tried again, less and less often, for a day")
        assert len(other.requests) == 3
        other.answers[:] = [OK]
        assert run(engine, webhook.send, NOW + MINUTE).warnings == ()
        assert run(engine, webhook.send, NOW + 2 * MINUTE).warnings == ()
    assert len(other.requests) == 4
    assert [one["alerts"][0]["subject"] for one in other.told] == [group(1)] * 4


def test_what_fired_and_ended_before_anybody_heard_is_told_as_over(engine: Engine) -> None:
    ids = waiting(engine, 1)
    deaf, listener = Listener("deaf"), Listener()
    run(engine, deaf)
    settle(engine, *ids)
    run(engine, deaf, NOW + MINUTE)
    run(engine, listener, NOW + 2 * MINUTE)
    run(engine, listener, NOW + 3 * MINUTE)
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


def test_a_broken_receiver_is_tried_less_and_less_often_and_the_end_is_told(engine: Engine) -> None:
    """The other one hears of each alert once, whichever process tells: nothing is remembered but by the database."""
    waiting(engine, 1)
    deaf, well = Listener("the webhook is broken"), Listener()
    tried, told = [], []
    for minute in range(26 * 60):
        if minute >= 70 and minute % 30:  # by then it is tried once an hour
            continue
        calls = deaf.calls
        report = run_all(engine, {"webhook": deaf, "topic": well}, NOW + minute * MINUTE)
        tried += [minute] * (deaf.calls - calls)
        told.append((minute, report.outcome, report.warnings))
    assert tried[:8] == [0, 1, 3, 7, 15, 31, 63, 150]
    assert (len(tried), well.heard) == (MOST_TRIES, [(NEW_GROUP, group(1), "fired")])
    assert 23 * 60 < tried[-1] < 26 * 60
    between = next(warnings for minute, _, warnings in told if minute == 2)
    assert between == (
        f"1 alert(s) were not taken by the webhook so far; it is tried again at {NOW + 3 * MINUTE:%H:%M:%S} UTC",
    )
    last = next(warnings for minute, _, warnings in told if minute == tried[-1])
    assert last[1].startswith("1 alert(s) are not sent to the webhook any more: it was tried 30 times in about a day")
    assert {outcome for minute, outcome, _ in told if minute <= tried[-1]} == {"partial"}
    assert {outcome for minute, outcome, _ in told if minute > tried[-1]} == {"ok"}
    with reading(engine) as connection:
        assert connection.scalar(select(ALERTS.c.fired_told_at)) is not None


def test_a_receiver_that_works_again_gets_all_that_it_missed_at_once(engine: Engine) -> None:
    waiting(engine, 1)
    broken, well = Listener("broken"), Listener()
    for minute in (0, 1, 3):
        run(engine, broken, NOW + minute * MINUTE)
    ids = waiting(engine, 2)
    run(engine, well, NOW + 4 * MINUTE)  # the first one would have had to wait until minute 7
    assert sorted(well.heard) == [(NEW_GROUP, group(1), "fired"), (NEW_GROUP, group(2), "fired")]
    settle(engine, *ids)
    run(engine, well, NOW + 5 * MINUTE)
    assert well.heard[2:] == [(NEW_GROUP, group(2), "resolved")]
    with reading(engine) as connection:
        found = connection.execute(select(ALERT_RECEIVERS.c.told, ALERT_RECEIVERS.c.tries)).all()
    assert sorted(map(tuple, found)) == [("fired", 0), ("resolved", 0)]


def test_alerts_of_an_earlier_version_are_told_by_this_one(engine: Engine) -> None:
    ids = waiting(engine, 1, 2)
    run(engine, Listener())
    with writing(engine) as connection:
        connection.execute(delete(ALERT_RECEIVERS))
        connection.execute(update(ALERTS).where(ALERTS.c.subject == group(2)).values(fired_told_at=None))
    settle(engine, ids[0])
    listener = Listener()
    run(engine, listener, NOW + MINUTE)
    assert sorted(listener.heard) == [(NEW_GROUP, group(1), "resolved"), (NEW_GROUP, group(2), "fired")]


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
                calling = pool.submit(Webhook(other.url, timeout=1.5, total=1.5).send, notices)
                waiting(engine, 2)
                assert numbers(run(engine)) == (1, 0, 2)
                assert not calling.done()
                return calling.result()

        assert run(engine, tell).warnings


def test_a_dry_run_says_the_same_and_writes_nothing(engine: Engine) -> None:
    waiting(engine, 1, 2)
    listener = Listener()
    dry = Monitor(Alerts(engine), Thresholds(), lambda: NOW, {"webhook": listener}, dry_run=True)
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
