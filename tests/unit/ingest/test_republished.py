"""What a dead message means that its framework has published anew, without our headers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.ingest.arrivals import (
    AttemptFailed,
    Duplicate,
    Known,
    NewRow,
    Republished,
    SameFrameworkId,
    meaning_of_republished,
)
from dlqbatch.store.states import Status

NOW = datetime(2026, 2, 11, 12, tzinfo=UTC)
OTHERWISE = NewRow(Status.PENDING, "it has no id")
ENDS = (None, "failed", "succeeded", "abandoned")


def kin(
    row_id: int, status: Status, *outcomes: str | None, began: int = 0, digest: bytes | None = None
) -> SameFrameworkId:
    numbered = list(enumerate(outcomes, 1))
    known = Known(
        status,
        b"d" * 32,
        open_attempt=max((number for number, outcome in numbered if outcome is None), default=None),
        failed_attempts=frozenset(number for number, outcome in numbered if outcome == "failed"),
        resolved_by=max((number for number, outcome in numbered if outcome == "succeeded"), default=None),
    )
    begun = {number: NOW + timedelta(seconds=began + number) for number, _ in numbered}
    return SameFrameworkId(row_id, f"row-{row_id}", known, begun, digest)


def died(after: int, *, redelivered: bool = False, digest: bytes = b"1") -> Republished:
    return Republished(digest, redelivered, NOW + timedelta(seconds=after))


kins = st.lists(
    st.builds(
        lambda row_id, status, outcomes, began, digest: kin(row_id, status, *outcomes, began=began, digest=digest),
        st.integers(1, 9),
        st.sampled_from(Status),
        st.lists(st.sampled_from(ENDS), max_size=3),
        st.integers(-600, 600),
        st.sampled_from([None, b"1", b"2"]),
    ),
    max_size=4,
    unique_by=lambda row: row.row_id,
)


@given(kins, st.integers(-900, 900), st.booleans(), st.sets(st.sampled_from([b"1", b"2"])))
def test_a_failure_is_an_attempts_that_began_before_and_everything_else_is_kept(
    rows: list[SameFrameworkId], after: int, redelivered: bool, seen: set[bytes]
) -> None:
    arrival = died(after, redelivered=redelivered)
    meaning, row_id = meaning_of_republished(arrival, OTHERWISE, rows, seen)
    row = next((each for each in rows if each.row_id == row_id), None)
    if isinstance(meaning, NewRow):
        assert row_id is None
        assert (meaning.parent is None) == (not rows)
        assert meaning.status is (Status.MANUAL if any(each.begun for each in rows) else Status.PENDING)
        return
    assert row is not None
    if isinstance(meaning, Duplicate):
        assert redelivered
        assert row.returned_digest == arrival.digest
        assert arrival.digest not in seen
        assert not meaning.reopens
        return
    assert row.known.status is (Status.RESOLVED if meaning.late else Status.PROCESSING)
    assert meaning.number == (row.known.resolved_by if meaning.late else row.known.open_attempt)
    assert row.begun[meaning.number] <= arrival.died_at + timedelta(seconds=30)


def test_an_open_attempt_comes_before_a_resolved_one_and_the_oldest_first() -> None:
    resolved = kin(1, Status.RESOLVED, "succeeded")
    older, newer = kin(3, Status.PROCESSING, None), kin(2, Status.PROCESSING, None, began=60)
    assert meaning_of_republished(died(300), OTHERWISE, [resolved, newer, older], ()) == (AttemptFailed(1), 3)
    assert meaning_of_republished(died(20), OTHERWISE, [resolved, newer], ()) == (AttemptFailed(1, late=True), 1)
