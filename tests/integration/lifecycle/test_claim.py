"""Claims, attempts and the queries that people see: right with many workers, and fast with many rows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from threading import Barrier
from typing import TYPE_CHECKING, Any

import plan_rows
import pytest
from dead_rows import NOW, add, begin_attempts, fill, row, store_at
from program import HANGS_AFTER
from query_plans import statements_of, walk
from sqlalchemy import func, select, text

from dlqbatch.lifecycle import attempts, leases
from dlqbatch.lifecycle.leases import claim, give_back, take_over
from dlqbatch.lifecycle.outcome_rows import SentAttempts
from dlqbatch.lifecycle.strategy import Back
from dlqbatch.messages.queries import WAITING, Detail, content, find, get, groups
from dlqbatch.store import journal as states
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.filters import Filters, Place
from dlqbatch.store.states import Status, Strategy
from dlqbatch.store.tables import MESSAGES, TRANSITIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy import Engine

MINUTE = timedelta(minutes=1)
SECOND = timedelta(seconds=1)
WORKERS = {"postgresql": 10, "sqlite": 4}
DUE = {"postgresql": 10_000, "sqlite": 2_000}
MANY = 30_000


@pytest.fixture(params=["postgresql", "sqlite"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return store_at(str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param])))


def due(engine: Engine, number: int = 1, **columns: Any) -> list[int]:
    return add(engine, *(row(next_retry_at=NOW, **columns) for _ in range(number)))


def look_at(engine: Engine, row_id: int) -> Detail:
    with reading(engine) as connection:
        found = get(connection, row_id)
    assert found is not None
    return found


def claimed(engine: Engine, now: Any = NOW, owner: str = "w") -> dict[int, str]:
    return {row.row_id: row.token for row in claim(engine, owner, now)}


def begin(engine: Engine, tokens: dict[int, str], at: Any = NOW) -> dict[int, int]:
    return begin_attempts(engine, tokens, Strategy.IMMEDIATE, "w", at)


# --- The claim


def test_priority_comes_first_then_age(engine: Engine) -> None:
    ids = {}
    for name, priority, age in (("a", 0, 3), ("b", 9, 1), ("c", 9, 2), ("d", 5, 9)):
        (ids[name],) = add(engine, row(priority=priority, next_retry_at=NOW), at=NOW - age * MINUTE)
    assert [row.row_id for row in claim(engine, "w", NOW, limit=3)] == [ids["c"], ids["b"], ids["d"]]
    assert [row.row_id for row in claim(engine, "w", NOW, limit=3)] == [ids["a"]]


def test_a_claimed_row_is_locked_leased_and_journalled(engine: Engine) -> None:
    (row_id,) = due(engine, body=b"12345")
    (claimed_row,) = claim(engine, "host-1", NOW)
    assert (claimed_row.row_id, claimed_row.body_size, claimed_row.has_attempt) == (row_id, 5, False)
    record = look_at(engine, row_id).record
    assert record.status is Status.PROCESSING
    assert (record.lock_owner, record.locked_at, record.lease_until) == ("host-1", NOW, NOW + 5 * MINUTE)
    assert record.lock_token == claimed_row.token
    last = look_at(engine, row_id).transitions[-1]
    assert (last.from_status, last.to_status, last.actor) == ("pending", "processing", "lifecycle")
    assert claim(engine, "host-2", NOW) == []


def test_what_is_not_due_or_not_for_the_lifecycle_is_left(engine: Engine) -> None:
    add(engine, row(next_retry_at=NOW + MINUTE), row(next_retry_at=None), row(next_retry_at=NOW, plan_id=1))
    add(engine, row(next_retry_at=NOW, status=Status.MANUAL))
    assert claim(engine, "w", NOW) == []
    assert len(claim(engine, "w", NOW + MINUTE)) == 1


def test_a_claim_writes_each_row_once(engine: Engine) -> None:
    due(engine, 3)
    with statements_of(engine) as seen:
        assert len(claim(engine, "w", NOW)) == 3
    assert sum(statement.startswith("UPDATE dlq_messages") for statement, _ in seen) == 1


def test_what_others_hold_at_this_moment_keeps_nobody_from_what_is_due_behind_it(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = store_at(database_url)
    monkeypatch.setattr("dlqbatch.lifecycle.leases._LOOKED_AT", 4)
    held = due(engine, 4, priority=9)
    free = due(engine, 2)
    with writing(engine) as other:
        other.execute(select(MESSAGES.c.id).where(MESSAGES.c.id.in_(held)).with_for_update())
        assert set(claimed(engine)) == set(free)
        assert claimed(engine) == {}
    assert set(claimed(engine)) == set(held)


def test_what_a_plan_reserves_between_look_and_lock_is_not_claimed(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = store_at(database_url)
    reserved, free = due(engine, 2)
    look = leases._next

    def then_reserve(*arguments: Any) -> Any:
        found = look(*arguments)
        with writing(engine) as plan:
            plan.execute(MESSAGES.update().where(MESSAGES.c.id == reserved).values(plan_id=1))
        return found

    monkeypatch.setattr(leases, "_next", then_reserve)
    assert set(claimed(engine)) == {free}


def test_a_row_that_an_older_program_has_marked_goes_in_its_turn(engine: Engine) -> None:
    (low,) = due(engine, priority=1)
    (marked,) = due(engine, priority=5, is_due=True)
    (high,) = due(engine, priority=9)
    assert [row.row_id for row in claim(engine, "w", NOW)] == [high, marked, low]


def test_workers_at_once_claim_every_due_row_exactly_once(engine: Engine) -> None:
    number, workers = DUE[engine.dialect.name], WORKERS[engine.dialect.name]
    fill(engine, number, due=number)
    start = Barrier(workers)

    def work(worker: int) -> list[int]:
        start.wait(HANGS_AFTER)
        mine: list[int] = []
        while rows := claim(engine, f"w{worker}", NOW):
            mine += [row.row_id for row in rows]
        return mine

    with ThreadPoolExecutor(workers) as pool:
        shares = list(pool.map(work, range(workers)))
    # Who found nothing may have looked while another one held the rest; that one came back for it.
    taken = [row_id for share in shares for row_id in share]
    assert len(taken) == len(set(taken)) == number
    with reading(engine) as connection:
        assert connection.scalar(select(func.count()).where(TRANSITIONS.c.to_status == "processing")) == number


# --- Attempts


def test_an_attempt_is_there_unsent_before_its_publish_and_marked_after(engine: Engine) -> None:
    (row_id,) = due(engine)
    tokens = claimed(engine)
    assert begin(engine, tokens, NOW + MINUTE) == {row_id: 1}
    before = look_at(engine, row_id)
    assert [(one.number, one.sent_at, one.outcome) for one in before.attempts] == [(1, None, None)]
    assert before.record.lease_until == NOW + 6 * MINUTE
    attempts.mark_sent(engine, {row_id: 1}, NOW + 2 * MINUTE)
    after = look_at(engine, row_id)
    assert [one.sent_at for one in after.attempts] == [NOW + 2 * MINUTE]
    assert after.record == before.record
    assert after.transitions == before.transitions


def test_a_row_claimed_a_moment_ago_is_not_written_again_and_an_older_lease_starts_anew(engine: Engine) -> None:
    (row_id,) = due(engine)
    tokens = claimed(engine)
    soon = NOW + 20 * SECOND
    assert begin(engine, tokens, soon) == {row_id: 1}
    assert look_at(engine, row_id).record.updated_at == NOW
    assert begin(engine, tokens, NOW + MINUTE) == {row_id: 1}
    assert look_at(engine, row_id).record.lease_until == NOW + 6 * MINUTE


@pytest.mark.parametrize("strategy", [Strategy.IMMEDIATE, Strategy.SCHEDULED, Strategy.CONDITIONAL])
def test_what_an_attempt_was_sent_by_is_known_before_it_can_come_back(engine: Engine, strategy: Strategy) -> None:
    """Without a mark a row that has no strategy yet counts as immediate; with it the row says so itself."""
    (row_id,) = due(engine)
    begin_attempts(engine, claimed(engine), strategy, "w", NOW)
    assert (look_at(engine, row_id).record.strategy or Strategy.IMMEDIATE) is strategy
    attempts.mark_sent(engine, {row_id: 1}, NOW)
    assert SentAttempts(engine).resolve({row_id: (1, "it did not come back")}, NOW) == {row_id}
    assert look_at(engine, row_id).record.strategy is strategy


def test_only_the_holder_of_the_token_begins_an_attempt(engine: Engine) -> None:
    (row_id,) = due(engine)
    tokens = claimed(engine)
    assert begin(engine, {row_id: "stale", row_id + 1: "none"}) == {}
    assert begin(engine, tokens) == {row_id: 1}


def test_a_closed_attempt_is_followed_by_the_next_number(engine: Engine) -> None:
    (row_id,) = due(engine)
    for number in (1, 2, 3):
        tokens = claimed(engine)
        assert begin(engine, tokens) == {row_id: number}
        attempts.mark_sent(engine, {row_id: number}, NOW)
        with writing(engine) as connection:
            assert attempts.close_attempts(connection, {row_id: number}, "failed", NOW)
            assert not attempts.close_attempts(connection, {row_id: number}, "failed", NOW)
            start, end = Status.PROCESSING, Status.PENDING
            assert states.move(
                connection, row_id, start, end, tokens[row_id], NOW, "ingest", "failed again", next_retry_at=NOW
            )
    assert [one.outcome for one in look_at(engine, row_id).attempts] == ["failed"] * 3


def test_a_late_return_corrects_a_success(engine: Engine) -> None:
    (row_id,) = due(engine)
    begin(engine, claimed(engine))
    with writing(engine) as connection:
        assert attempts.close_attempts(connection, {row_id: 1}, "succeeded", NOW)
        assert not attempts.close_attempts(connection, {row_id: 1}, "failed", NOW)
        assert attempts.close_attempts(connection, {row_id: 1}, "failed", NOW + MINUTE, was="succeeded")
    (attempt,) = look_at(engine, row_id).attempts
    assert (attempt.outcome, attempt.closed_at) == ("failed", NOW + MINUTE)


def test_a_lease_that_ran_out_is_taken_over_under_the_same_number(engine: Engine) -> None:
    (row_id,) = due(engine)
    old = claimed(engine)
    begin(engine, old)
    assert take_over(engine, "v", NOW + 5 * MINUTE) == []
    (taken,) = take_over(engine, "v", NOW + 6 * MINUTE)
    record = look_at(engine, row_id).record
    assert (taken.row_id, record.lock_owner, record.lease_until) == (row_id, "v", NOW + 11 * MINUTE)
    assert old[row_id] != taken.token == record.lock_token
    assert begin(engine, old) == {}
    assert begin(engine, {row_id: taken.token}) == {row_id: 1}
    assert "taken over" in look_at(engine, row_id).transitions[-1].reason


def test_a_lease_that_ran_out_before_any_attempt_is_taken_over_too(engine: Engine) -> None:
    (row_id,) = due(engine)
    claimed(engine)
    assert [row.row_id for row in take_over(engine, "v", NOW + 6 * MINUTE)] == [row_id]


def test_what_was_sent_is_under_observation_and_nobody_takes_it_over(engine: Engine) -> None:
    (row_id,) = due(engine)
    begin(engine, claimed(engine))
    attempts.mark_sent(engine, {row_id: 1}, NOW)
    assert take_over(engine, "v", NOW + 60 * MINUTE) == []


def test_a_confirm_that_arrives_after_the_take_over_stops_the_second_send(engine: Engine) -> None:
    (row_id,) = due(engine)
    begin(engine, claimed(engine))
    (taken,) = take_over(engine, "v", NOW + 6 * MINUTE)
    attempts.mark_sent(engine, {row_id: 1}, NOW + 6 * MINUTE)
    assert begin(engine, {row_id: taken.token}) == {}
    assert give_back(engine, {row_id: Back(taken.token, Status.PENDING, "breaker open", NOW)}, NOW) == set()
    assert take_over(engine, "u", NOW + 60 * MINUTE) == []


def test_a_late_confirm_of_a_closed_attempt_does_not_end_the_lease_of_the_next(engine: Engine) -> None:
    (row_id,) = due(engine)
    begin(engine, claimed(engine))
    with writing(engine) as connection:
        attempts.close_attempts(connection, {row_id: 1}, "failed", NOW)
    token = look_at(engine, row_id).record.lock_token or ""
    assert begin(engine, {row_id: token}) == {row_id: 2}
    attempts.mark_sent(engine, {row_id: 1}, NOW)
    found = look_at(engine, row_id)
    assert found.record.lease_until is not None
    assert [one.sent_at for one in found.attempts] == [NOW, None]


def test_a_replay_takes_over_its_own_rows_and_the_lifecycle_leaves_them(engine: Engine) -> None:
    (row_id,) = add(engine, plan_rows.dead())
    frozen = plan_rows.freeze(engine)
    assert plan_rows.applying(engine, frozen).take(1, None, NOW).numbers == {row_id: 1}
    later = NOW + 6 * MINUTE
    assert take_over(engine, "v", later) == []
    assert take_over(engine, "v", later, plan_id=frozen.plan_id + 1) == []
    assert [row.row_id for row in take_over(engine, "v", later, plan_id=frozen.plan_id)] == [row_id]


def test_rows_that_are_given_back_wait_again_and_their_unsent_attempt_is_abandoned(engine: Engine) -> None:
    first, second = due(engine, 2)
    tokens = claimed(engine)
    begin(engine, {first: tokens[first]})
    then = NOW + 10 * MINUTE
    tokens[second] = "stale"
    backs = {row_id: Back(token, Status.PENDING, "breaker open", then) for row_id, token in tokens.items()}
    assert give_back(engine, backs, NOW) == {first}
    found = look_at(engine, first)
    assert (found.record.status, found.record.next_retry_at, found.record.lock_owner) == ("pending", then, None)
    assert [one.outcome for one in found.attempts] == ["abandoned"]
    assert look_at(engine, second).record.status is Status.PROCESSING
    assert begin(engine, claimed(engine, then)) == {first: 2}


# --- Lists and groups


def test_pages_follow_each_other_without_gap_or_repetition(engine: Engine) -> None:
    ids = due(engine, 25)
    seen: list[int] = []
    place: Place | None = None
    with reading(engine) as connection:
        while True:
            page = find(connection, Filters(), 10, place)
            seen += [record.id for record in page.records]
            place = page.next
            if place is None:
                break
    assert seen == sorted(ids, reverse=True)


def test_every_filter_finds_its_own(engine: Engine) -> None:
    columns = {"error_type": "T", "fingerprint": "f" * 16, "event": "e", "origin_queue": "q", "error_message": "Ab%c_d"}
    (wanted,) = add(engine, row(**columns))
    add(engine, row(status=Status.MANUAL, error_message="AbXcYd"), at=NOW - 60 * MINUTE)
    since = NOW - MINUTE
    all_of = Filters.parse(error_type="T", group="f" * 16, event="e", origin="q", statuses=WAITING, text="ab%")
    for filters in (
        Filters.parse(error_type="T"),
        Filters.parse(group="f" * 16),
        Filters.parse(event="e"),
        Filters.parse(origin="q"),
        Filters(statuses=(Status.PENDING,)),
        Filters(since=since),
        Filters.parse(text="b%C_"),
        replace(all_of, since=since, until=NOW + MINUTE),
    ):
        with reading(engine) as connection:
            assert [record.id for record in find(connection, filters).records] == [wanted], filters
            found = groups(connection, filters).groups
            assert [(group.fingerprint, group.size, group.sample.id) for group in found] == [("f" * 16, 1, wanted)]
    with reading(engine) as connection:
        assert find(connection, Filters(until=NOW - 60 * MINUTE)).records == ()


def test_a_hostile_text_is_a_text(engine: Engine) -> None:
    odd = ["'; DROP TABLE dlq_messages; --", "%", "_", "\\", "a\\%", '"', ":x", "%(x)s", "?", "nul \0", "\ud800"]
    for hostile in odd:
        here = f"event of {hostile}"
        (wanted,) = add(engine, row(error_message=f"so {hostile} it is", event=here))
        add(engine, row(error_message="nothing so", event=here))
        with reading(engine) as connection:
            found = find(connection, Filters.parse(event=here, text=hostile)).records
            assert [record.id for record in found] == [wanted], hostile
            assert find(connection, Filters.parse(event=hostile, error_type=hostile, group=hostile)).records == ()


def test_a_search_looks_at_so_many_rows_and_goes_on_from_there(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlqbatch.messages.queries.LOOKED_THROUGH", 10)
    monkeypatch.setattr("dlqbatch.messages.queries.COUNTED", 10)
    (oldest,) = add(engine, row(error_message="needle"), at=NOW - MINUTE)
    due(engine, 10)
    with reading(engine) as connection:
        page = find(connection, Filters.parse(text="needle"))
        assert page.records == ()
        assert page.next is not None
        following = find(connection, Filters.parse(text="needle"), after=page.next)
        assert [record.id for record in following.records] == [oldest]
        assert following.next is None
        assert not groups(connection, Filters.parse(text="needle")).is_complete


def test_groups_count_what_is_not_over_largest_first(engine: Engine) -> None:
    small, large = "a" * 16, "b" * 16
    add(engine, row(fingerprint=small), row(fingerprint=large), row(fingerprint=large, status=Status.MANUAL))
    (newest,) = add(engine, row(fingerprint=large), at=NOW + MINUTE)
    with reading(engine) as connection:
        found = groups(connection, Filters())
        largest = groups(connection, Filters(), limit=1)
    assert (found.total, [group.fingerprint for group in largest.groups], largest.total) == (2, [large], 2)
    assert [(group.fingerprint, group.counts) for group in found.groups] == [
        (large, {Status.PENDING: 2, Status.MANUAL: 1}),
        (small, {Status.PENDING: 1}),
    ]
    assert (found.groups[0].sample.id, found.groups[0].first, found.groups[0].last) == (newest, NOW, NOW + MINUTE)
    assert found.is_complete


def test_content_is_fetched_for_the_rows_that_are_asked_for(engine: Engine) -> None:
    ids = [due(engine, body=bytes([number]))[0] for number in range(3)]
    with reading(engine) as connection:
        assert {row_id: each.body for row_id, each in content(connection, ids[:2]).items()} == {
            ids[0]: b"\0",
            ids[1]: b"\1",
        }
        assert get(connection, ids[2] + 1) is None


# --- Many rows


def everything_asked(engine: Engine) -> dict[str, Callable[[], object]]:
    named = Filters.parse(
        error_type="Error3", group=f"{3:016}", event="event-3", origin="queue-3", statuses=WAITING, text="attempt 3"
    )
    every = replace(named, since=NOW - 60 * MINUTE, until=NOW)
    one_each = [
        Filters(),
        Filters.parse(error_type="Error3"),
        Filters.parse(group=f"{3:016}"),
        Filters.parse(event="event-3"),
        Filters.parse(origin="queue-3"),
        Filters(statuses=(Status.FAILED,)),
        Filters(statuses=WAITING),
        Filters(since=NOW - 60 * MINUTE, until=NOW),
        Filters.parse(text="nowhere"),
        Filters.parse(event="event-3", text="nowhere"),
        Filters.parse(event="no such"),
        every,
    ]

    def ask(query: Callable[..., Any], *arguments: Any) -> None:
        with reading(engine) as connection:
            query(connection, *arguments)

    behind = Place(NOW - 600 * MINUTE, 5)
    asked: dict[str, Callable[[], object]] = {
        "claim": lambda: claim(engine, "w", NOW),
        "take over": lambda: take_over(engine, "w", NOW + 6 * MINUTE),
        "get": lambda: ask(get, 1),
    }
    for filters in one_each:
        asked[f"find {filters}"] = lambda filters=filters: ask(find, filters)
        asked[f"find behind {filters}"] = lambda filters=filters: ask(find, filters, 50, behind)
        asked[f"groups {filters}"] = lambda filters=filters: ask(groups, filters)
    return asked


@pytest.mark.slow
def test_no_query_walks_the_whole_table(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    # So many more rows than a query may look at as there are with a million.
    monkeypatch.setattr("dlqbatch.messages.queries.LOOKED_THROUGH", 2_500)
    monkeypatch.setattr("dlqbatch.messages.queries.COUNTED", 10_000)
    fill(engine, 50_000, due=200)
    walking: Sequence[str] = []
    for name, query in everything_asked(engine).items():
        with statements_of(engine) as seen:
            query()
        assert seen, name
        walking = [*walking, *(f"{name}\n{s}\n{plan}" for s, p in seen if (plan := walk(engine, s, p)))]
    assert not walking, "\n\n".join(walking)


@pytest.mark.slow
def test_a_claim_of_a_hundred_reads_little_more_with_many_rows(database_url: str) -> None:
    engine = store_at(database_url)

    def blocks() -> int:
        """All that was read of the messages and their indexes so far, from disk or memory."""
        with reading(engine) as connection:
            connection.execute(text("SELECT pg_stat_force_next_flush()"))
        asking = "SELECT heap_blks_read + heap_blks_hit + idx_blks_read + idx_blks_hit FROM pg_statio_user_tables"
        with reading(engine) as connection:
            return int(connection.scalar(text(f"{asking} WHERE relname = 'dlq_messages'")) or 0)

    def fewest() -> int:
        """Of a claim; an autovacuum may read beside some of them."""
        read = []
        for _ in range(9):
            before = blocks()
            assert len(claim(engine, "w", NOW, limit=100)) == 100
            read.append(blocks() - before)
        return min(read)

    fill(engine, 1_000, due=1_000)
    few = fewest()
    with writing(engine) as connection:
        connection.execute(text("TRUNCATE dlq_messages CASCADE"))
    fill(engine, MANY, due=1_000)
    many = fewest()
    assert 0 < many < 1.5 * few, f"{many} blocks at {MANY} rows, {few} at 1,000"
    with reading(engine) as connection:
        assert connection.scalar(select(func.count()).select_from(MESSAGES)) == MANY
