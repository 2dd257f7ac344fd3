from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise, product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.ingest.arrivals import Arrival, AttemptFailed, Duplicate, Known, Meaning, NewRow, meaning_of_arrival
from dlqbatch.lifecycle.backoff_and_off_peak import Options
from dlqbatch.lifecycle.max_attempts import MAX_ATTEMPTS, after_failed_attempt
from dlqbatch.lifecycle.return_checks import LoggedRun, unseen
from dlqbatch.store.states import (
    ARRIVALS,
    ITEM_MOVES,
    MOVES,
    PERSONS_MOVES,
    PLAN_MOVES,
    Move,
    MoveRefused,
    Status,
    Strategy,
    allowed,
    check,
    pairs,
    path,
    path_of_discard,
)

DRAWING = Path(__file__).parents[3] / "docs" / "dead-store.md"
NOW = datetime(2026, 2, 11, 12, tzinfo=UTC)
PENDING, PROCESSING, RESOLVED = Status.PENDING, Status.PROCESSING, Status.RESOLVED
FAILED, MANUAL, ARCHIVED = Status.FAILED, Status.MANUAL, Status.ARCHIVED
STATUSES = st.sampled_from(Status)


# --- The table


def drawn() -> set[tuple[str | None, str]]:
    blocks = re.findall(r"```mermaid\nstateDiagram-v2\n(.*?)```", DRAWING.read_text(encoding="utf-8"), re.DOTALL)
    (block,) = blocks
    found: set[tuple[str | None, str]] = set()
    for line in block.splitlines():
        start, arrow, end = line.partition("-->")
        assert arrow, line
        found.add((None if start.strip() == "[*]" else start.strip(), end.partition(":")[0].strip()))
    return found


def test_the_drawing_and_the_table_say_the_same() -> None:
    assert drawn() == set(pairs())


def test_the_drawings_of_plans_and_their_items_and_their_tables_say_the_same() -> None:
    blocks = re.findall(r"```mermaid\nflowchart LR\n(.*?)```", DRAWING.read_text(encoding="utf-8"), re.DOTALL)
    blocks = [block for block in blocks if "planned -->" in block or "waiting -->" in block]
    names = re.compile(r"^ *(\w+) -->.* (\w+)$", re.MULTILINE)
    for block, moves in zip(blocks, (PLAN_MOVES, ITEM_MOVES), strict=True):
        assert sorted(names.findall(block)) == sorted((start, end) for start, ends in moves.items() for end in ends)
        assert {end for ends in moves.values() for end in ends} <= set(moves)


def test_the_pairs_are_every_allowed_move_once_and_in_a_fixed_order() -> None:
    everything = {(start, end) for start, end in product((None, *Status), Status) if allowed(start, end)}
    assert set(pairs()) == everything
    assert len(pairs()) == len(everything)
    assert pairs()[:3] == ((None, "pending"), (None, "manual"), ("pending", "pending"))
    assert all(type(text) is str for pair in pairs() for text in pair if text is not None)


def test_every_state_has_a_row_and_every_state_can_be_reached() -> None:
    assert set(MOVES) == set(Status)
    for status in Status:
        assert any(path(arrival, status, by_person=True) or arrival is status for arrival in ARRIVALS)


@pytest.mark.parametrize(("start", "end"), list(product((None, *Status), Status)))
@pytest.mark.parametrize("by_person", [True, False])
def test_what_is_not_allowed_is_refused_with_what_it_can_do_instead(
    start: Status | None, end: Status, by_person: bool
) -> None:
    if allowed(start, end, by_person=by_person):
        check(start, end, by_person=by_person)
        return
    with pytest.raises(MoveRefused, match="message 7 cannot go from") as refused:
        check(start, end, message_id=7, by_person=by_person)
    error = refused.value
    assert (error.message_id, error.start, error.end, error.exit_code) == (7, start, end, 2)
    assert str(end) in str(error)
    assert ("without a person" in str(error)) == (start is not None and Move(start, end) in PERSONS_MOVES)


def test_only_a_person_takes_a_message_out_of_failed_manual_or_archived() -> None:
    assert {move.start for move in PERSONS_MOVES} == {FAILED, MANUAL, ARCHIVED}
    assert all(end in MOVES[start] for start, end in PERSONS_MOVES)
    assert not allowed(FAILED, PROCESSING, by_person=False)
    assert allowed(FAILED, ARCHIVED, by_person=False)


@given(STATUSES, STATUSES, st.booleans())
def test_a_path_is_made_of_allowed_moves_that_join(start: Status, end: Status, by_person: bool) -> None:
    try:
        moves = path(start, end, by_person=by_person)
    except MoveRefused:
        assert not by_person
        return
    assert all(allowed(*move, by_person=by_person) for move in moves)
    assert all(one.end is other.start for one, other in pairwise(moves))
    assert (start is end and moves == ()) or (moves[0].start is start and moves[-1].end is end)


@pytest.mark.parametrize(
    ("status", "through"),
    [
        (PENDING, [PROCESSING, MANUAL, ARCHIVED]),
        (PROCESSING, [MANUAL, ARCHIVED]),
        (MANUAL, [ARCHIVED]),
        (FAILED, [ARCHIVED]),
        (RESOLVED, [PENDING, PROCESSING, MANUAL, ARCHIVED]),
        (ARCHIVED, []),
    ],
)
def test_a_discard_goes_through_the_table(status: Status, through: list[Status]) -> None:
    moves = path_of_discard(status)
    assert [move.end for move in moves] == through
    assert all(allowed(*move) for move in moves)
    assert [move.start for move in moves] == [status, *through][: len(moves)]


# --- After a failed attempt


def test_an_attempt_that_fails_is_followed_by_the_next_one() -> None:
    outcome = after_failed_attempt(PROCESSING, 0, Strategy.IMMEDIATE, NOW, Options())
    assert outcome.moves == (Move(PROCESSING, PENDING),)
    assert (outcome.dlq_retry_count, outcome.next_retry_at) == (1, NOW + timedelta(minutes=5))


@pytest.mark.parametrize("strategy", Strategy)
def test_the_fifth_failure_is_the_last(strategy: Strategy) -> None:
    outcome = after_failed_attempt(PROCESSING, 4, strategy, NOW, Options())
    assert outcome.moves == (Move(PROCESSING, FAILED),)
    assert (outcome.dlq_retry_count, outcome.next_retry_at) == (5, None)


def test_an_absurd_number_of_failures_is_bounded() -> None:
    """As a column of integers is, or PostgreSQL would refuse the whole batch with it."""
    assert after_failed_attempt(PROCESSING, 2**31 - 1, Strategy.IMMEDIATE, NOW, Options()).dlq_retry_count == 2**31 - 1


def test_what_has_no_next_time_waits_for_a_person_and_not_unseen_in_pending() -> None:
    outcome = after_failed_attempt(PROCESSING, 1, Strategy.MANUAL, NOW, Options())
    assert (outcome.status, outcome.next_retry_at) == (MANUAL, None)


def test_a_late_return_is_reopened_before_anything_else_becomes_of_it() -> None:
    assert after_failed_attempt(RESOLVED, 0, Strategy.IMMEDIATE, NOW, Options()).moves == (Move(RESOLVED, PENDING),)
    assert after_failed_attempt(RESOLVED, 4, Strategy.IMMEDIATE, NOW, Options()).moves == (
        Move(RESOLVED, PENDING),
        Move(PENDING, PROCESSING),
        Move(PROCESSING, FAILED),
    )


@given(st.sampled_from([PROCESSING, RESOLVED]), st.integers(0, 9), st.sampled_from(Strategy), st.floats(0, 1, width=16))
def test_a_pending_row_always_has_a_time_and_no_run_makes_a_persons_move(
    status: Status, before: int, strategy: Strategy, jitter: float
) -> None:
    outcome = after_failed_attempt(status, before, strategy, NOW, Options(), jitter=jitter)
    assert outcome.dlq_retry_count == before + 1
    assert (outcome.status is FAILED) == (before + 1 >= MAX_ATTEMPTS)
    assert (outcome.status is PENDING) == (outcome.next_retry_at is not None)
    assert outcome.next_retry_at is None or outcome.next_retry_at > NOW
    assert all(allowed(*move, by_person=False) for move in outcome.moves)


# --- What an arrival means

ONE, OTHER = b"1" * 32, b"2" * 32


def arrives(attempt: int | None = None, *, digest: bytes = ONE, has_id: bool = True, again: bool = False) -> Arrival:
    return Arrival(has_id=has_id, redelivered=again, attempt=attempt, digest=digest)


@pytest.mark.parametrize(
    ("arrival", "known", "twins", "meaning"),
    [
        # In the order of the table in docs/dead-store.md.
        (arrives(), None, 0, NewRow(PENDING, "its id is new")),
        (arrives(3), None, 0, NewRow(MANUAL, "attempt 3 of a message that was deleted", 3)),
        (
            arrives(digest=OTHER),
            Known(PENDING, ONE),
            0,
            NewRow(PENDING, "its id belongs to another message", is_child=True),
        ),
        (
            arrives(2, digest=OTHER),
            Known(PROCESSING, ONE, open_attempt=2),
            0,
            NewRow(MANUAL, "its id belongs to another message", 2, is_child=True),
        ),
        (arrives(2), Known(PROCESSING, ONE, open_attempt=2), 0, AttemptFailed(2)),
        (arrives(1), Known(PENDING, ONE, failed_attempts=frozenset({1})), 0, Duplicate("attempt 1 came back before")),
        (
            arrives(1),
            Known(PROCESSING, ONE, open_attempt=2, failed_attempts=frozenset({1})),
            0,
            Duplicate("attempt 1 came back before"),
        ),
        (
            arrives(2),
            Known(RESOLVED, ONE, failed_attempts=frozenset({1}), resolved_by=2),
            0,
            AttemptFailed(2, late=True),
        ),
        (
            arrives(1),
            Known(PROCESSING, ONE, open_attempt=2),
            0,
            Duplicate("attempt 1 came back while attempt 2 is open"),
        ),
        (arrives(1), Known(ARCHIVED, ONE), 0, NewRow(MANUAL, "attempt 1 of a message that is archived", 1, True)),
        (
            arrives(2),
            Known(RESOLVED, ONE, resolved_by=3),
            0,
            NewRow(MANUAL, "attempt 2 of a message that is resolved", 2, True),
        ),
        (arrives(2), Known(PROCESSING, ONE), 0, NewRow(MANUAL, "attempt 2 of a message that is processing", 2, True)),
        (arrives(), Known(PENDING, ONE), 0, Duplicate("the same message again")),
        (arrives(again=True), Known(RESOLVED, ONE), 0, Duplicate("the same message again", reopens=True)),
        (arrives(has_id=False), None, 1, NewRow(PENDING, "it has no id")),
        (arrives(has_id=False, again=True), None, 1, Duplicate("the same message again, without an id")),
        (arrives(has_id=False, again=True), None, 0, NewRow(PENDING, "it has no id")),
        (arrives(has_id=False, again=True), None, 2, NewRow(PENDING, "it has no id", possible_duplicate=True)),
        (arrives(4, has_id=False), None, 0, NewRow(MANUAL, "it has no id", 4)),
        (replace(arrives(has_id=False), circles=True), None, 0, NewRow(MANUAL, "it has no id")),
        (replace(arrives(), circles=True), None, 0, NewRow(MANUAL, "its id is new")),
    ],
)
def test_what_an_arrival_means(arrival: Arrival, known: Known | None, twins: int, meaning: Meaning) -> None:
    assert meaning_of_arrival(arrival, known, unproven_duplicates=twins) == meaning


ATTEMPTS = st.one_of(st.none(), st.integers(1, 3))
ARRIVING = st.builds(Arrival, st.booleans(), st.booleans(), ATTEMPTS, st.sampled_from([ONE, OTHER]))
ROWS = st.builds(Known, STATUSES, st.sampled_from([ONE, OTHER]), ATTEMPTS, st.frozensets(st.integers(1, 3)), ATTEMPTS)


def test_a_twin_that_was_taken_for_a_message_before_leaves_it_in_doubt() -> None:
    again = arrives(has_id=False, again=True)
    assert meaning_of_arrival(again, None, unproven_duplicates=1, in_doubt=True) == NewRow(
        PENDING, "it has no id", possible_duplicate=True
    )


@given(ARRIVING, st.one_of(st.none(), ROWS), st.integers(0, 3))
def test_whatever_arrives_is_kept_or_is_here_already(arrival: Arrival, known: Known | None, twins: int) -> None:
    meaning = meaning_of_arrival(arrival, known, unproven_duplicates=twins)
    match meaning:
        case NewRow():
            assert meaning.status in ARRIVALS
            # What comes back from a retry of ours is never retried again by itself as a new message.
            assert arrival.attempt is None or meaning.status is MANUAL
            assert meaning.is_child <= (arrival.has_id and known is not None)
        case AttemptFailed():
            assert known is not None
            assert known.digest == arrival.digest
            assert known.status is (RESOLVED if meaning.late else PROCESSING)
        case Duplicate():
            same_row = arrival.has_id and known is not None and known.digest == arrival.digest
            assert same_row or (arrival.redelivered and twins == 1)
            assert not meaning.reopens or (known is not None and known.status is RESOLVED)


# --- When a retry counts as a success

WINDOW = timedelta(minutes=15)
SOURCES, DEAD = frozenset({"retry-queue", "retry-queue-1"}), frozenset({"dlq-queue"})


def at(minutes: float) -> datetime:
    return NOW + timedelta(minutes=minutes)


def drain(start: float, end: float | None, emptied: frozenset[str] = SOURCES) -> LoggedRun:
    return LoggedRun(at(start), None if end is None else at(end), emptied)


BOTH = frozenset({"a.dead", "b.dead"})


def ingest(start: float, end: float | None, emptied: frozenset[str] = DEAD) -> LoggedRun:
    return LoggedRun(at(start), None if end is None else at(end), emptied)


@pytest.mark.parametrize(
    ("drains", "ingests", "resolved"),
    [
        ([drain(16, 17)], [ingest(18, 19)], True),
        ([], [ingest(18, 19)], False),
        ([drain(16, 17)], [], False),
        ([drain(15, 17)], [ingest(18, 19)], False),  # not after the window but at its end
        ([drain(14, 17)], [ingest(18, 19)], False),
        ([drain(16, 18)], [ingest(17, 19)], False),  # the ingest began while the drain ran
        ([drain(16, 17)], [ingest(17, 19)], False),
        ([drain(16, None)], [ingest(18, 19)], False),
        ([drain(16, 17)], [ingest(18, None)], False),
        ([drain(16, 17, frozenset({"retry-queue"}))], [ingest(18, 19)], False),
        ([drain(16, 17, SOURCES | {"more"})], [ingest(18, 19)], True),
        ([drain(16, 17)], [ingest(18, 19, frozenset({"other"}))], False),
        ([drain(1, 2), drain(16, 17), drain(18.5, 19.5)], [ingest(3, 4), ingest(18, 19)], True),
        # Two drains of which each saw one half have not seen everything.
        (
            [drain(16, 17, frozenset({"retry-queue"})), drain(16, 17, frozenset({"retry-queue-1"}))],
            [ingest(18, 19)],
            False,
        ),
    ],
)
def test_a_retry_is_resolved_only_when_somebody_looked(
    drains: list[LoggedRun], ingests: list[LoggedRun], resolved: bool
) -> None:
    assert (not unseen(drains, ingests, SOURCES, DEAD, at(15))) == resolved


@pytest.mark.parametrize(
    ("drains", "ingests", "missing"),
    [
        ([], [], "no ingest that saw 'a.dead' empty has begun since (nor 1 more)"),
        ([drain(16, 17)], [ingest(18, 19, frozenset({"a.dead"}))], "no ingest that saw 'b.dead' empty has begun since"),
        (
            [drain(16, 19)],
            [ingest(18, 19, BOTH)],
            "no drain that saw 'retry-queue', 'retry-queue-1' empty has begun since",
        ),
        ([drain(16, 17)], [ingest(18, 19, BOTH)], ""),
    ],
)
def test_what_nobody_has_looked_into_is_named(drains: list[LoggedRun], ingests: list[LoggedRun], missing: str) -> None:
    assert unseen(drains, ingests, SOURCES, BOTH, at(15)).startswith(missing)
    assert bool(unseen(drains, ingests, SOURCES, BOTH, at(15))) == bool(missing)


MINUTES = st.integers(0, 40)
RUNS = st.lists(
    st.tuples(MINUTES, st.one_of(st.none(), st.integers(0, 10)), st.booleans()).map(
        lambda run: (run[0], None if run[1] is None else run[0] + run[1], run[2])
    ),
    max_size=6,
)


@given(MINUTES, RUNS, RUNS)
def test_having_looked_agrees_with_the_obvious_definition(
    sent: int,
    drained: list[tuple[int, int | None, bool]],
    ingested: list[tuple[int, int | None, bool]],
) -> None:
    drains = [drain(start, end, SOURCES if saw else frozenset()) for start, end, saw in drained]
    ingests = [ingest(start, end, DEAD if saw else frozenset()) for start, end, saw in ingested]
    expected = any(
        d_saw and i_saw and d_end is not None and i_end is not None and d_start > sent + 15 and i_start > d_end
        for (d_start, d_end, d_saw), (i_start, i_end, i_saw) in product(drained, ingested)
    )
    assert (not unseen(drains, ingests, SOURCES, DEAD, at(sent + 15))) == expected
