"""The same failure as two programs describe it is one line, and what is decided about the line holds for both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from arrivals import arrival
from dead_rows import NOW, add, fill, row, store_at
from query_plans import statements_of, walk
from sqlalchemy import select

from dlqbatch.actions.undo import undo
from dlqbatch.amqp.retry_headers import Origin
from dlqbatch.groups.decisions import acknowledge, hold, note, unhold
from dlqbatch.groups.inbox import inbox, of_group
from dlqbatch.groups.state import GroupState
from dlqbatch.ingest.dialects import Failure
from dlqbatch.ingest.rows import Ingestion
from dlqbatch.ingest.same_failure import Newcomers, groups_alike
from dlqbatch.lifecycle.leases import claim
from dlqbatch.store.action_tables import GROUPS
from dlqbatch.store.engine import reading
from dlqbatch.store.filters import Filters

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from dlqbatch.ingest.examine import Examined

JAVA, PYTHON, OTHER = "a" * 16, "b" * 16, "c" * 16
WHO: dict[str, Any] = {"actor": "ann", "reason": "for the developers"}


@pytest.fixture(params=["postgresql", "sqlite"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return store_at(str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param])))


def failed(group: str, **columns: Any) -> dict[str, Any]:
    kind = "shop.KeyError" if group == JAVA else "KeyError"
    told = {"error_type": kind, "error_message": "no currency in order 4711", "origin_queue": "orders"}
    return row(fingerprint=group, next_retry_at=NOW, **told | columns)


def claimed(engine: Engine) -> set[int]:
    found: set[int] = set()
    while some := claim(engine, "w", NOW, 100):
        found |= {each.row_id for each in some}
    return found


def arrives(engine: Engine, *batch: Examined, newcomers: Newcomers | None = None) -> None:
    """As the job stores it."""
    mine = newcomers or Newcomers()
    Ingestion(engine).store(batch, NOW, lambda connection, _: mine.take_over(connection, batch))


def in_python(number: int, queue: str = "orders", said: str = "no currency in order 12") -> Examined:
    return arrival(
        f"id-{number}",
        body=b"%d" % number,
        fingerprint=PYTHON,
        failure=Failure("KeyError", said, "Traceback …"),
        origin=Origin(queue, "shop", "orders.created"),
    )


def decisions(engine: Engine) -> dict[str, tuple[object, ...]]:
    """What is decided about each group: whether it is held, its note, owner and tags, who knows of it."""
    columns = GROUPS.c.held_at, GROUPS.c.note, GROUPS.c.owner, GROUPS.c.tags, GROUPS.c.acknowledged_by
    with reading(engine) as connection:
        return {
            fingerprint: (held is not None, *others)
            for fingerprint, held, *others in connection.execute(select(GROUPS.c.fingerprint, *columns))
        }


@pytest.mark.parametrize("named", [JAVA, PYTHON])
@pytest.mark.parametrize("queue", ["", "orders"])
def test_a_hold_of_the_line_holds_both_and_its_end_lets_both_go(engine: Engine, named: str, queue: str) -> None:
    both = add(engine, failed(JAVA), failed(JAVA), failed(PYTHON))
    (other,) = add(engine, failed(OTHER, error_message="no such tenant"))
    held = hold(engine, named, queue=queue, **WHO)
    assert held.also == ({JAVA: PYTHON, PYTHON: JAVA}[named],)
    assert claimed(engine) == {other}
    assert [(line.size, line.decisions.held_by) for line in of_group(engine, named).lines] == [(3, "ann")]
    unhold(engine, PYTHON, queue=queue, now=NOW, **WHO)
    assert claimed(engine) == set(both)


def test_what_arrives_in_a_dialect_that_nobody_had_seen_is_held_with_the_line(engine: Engine) -> None:
    add(engine, failed(JAVA))
    held = hold(engine, JAVA, **WHO)
    arrives(engine, in_python(1), in_python(2))
    assert [line.size for line in inbox(engine, Filters()).lines] == [3]
    assert decisions(engine)[PYTHON][0] is True
    undo(engine, held.action, now=NOW, **WHO)
    assert {each[0] for each in decisions(engine).values()} == {False}
    again = hold(engine, PYTHON, **WHO)
    assert again.also == (JAVA,)


def test_an_end_of_the_hold_lets_go_what_arrived_in_a_new_dialect(engine: Engine) -> None:
    add(engine, failed(JAVA))
    hold(engine, JAVA, queue="orders", **WHO)
    arrives(engine, in_python(1))
    lifted = unhold(engine, JAVA, queue="orders", now=NOW, **WHO)
    assert lifted.also == (PYTHON,)
    assert {each[0] for each in decisions(engine).values()} == {False}
    # To take back that it was lifted is to hold both again.
    undo(engine, lifted.action, now=NOW, **WHO)
    assert {each[0] for each in decisions(engine).values()} == {True}


def test_another_failure_or_another_queue_is_not_held(engine: Engine) -> None:
    add(engine, failed(JAVA))
    hold(engine, JAVA, **WHO)
    arrives(engine, in_python(1, queue="mails"), in_python(2, said="no such tenant"))
    assert set(decisions(engine)) == {JAVA}


def test_what_was_compared_in_vain_is_held_by_a_later_hold_of_its_line(engine: Engine) -> None:
    newcomers = Newcomers()
    add(engine, failed(JAVA), failed(OTHER, error_message="no such tenant"))
    hold(engine, OTHER, **WHO)
    arrives(engine, in_python(1), newcomers=newcomers)
    assert set(decisions(engine)) == {OTHER}
    hold(engine, JAVA, **WHO)
    arrives(engine, in_python(2), newcomers=newcomers)
    assert decisions(engine)[PYTHON][0] is True


def test_a_hold_of_somebody_else_stays_when_another_one_is_lifted(engine: Engine) -> None:
    add(engine, failed(JAVA))
    (kept,) = add(engine, failed(PYTHON, error_message="no such tenant"))
    hold(engine, PYTHON, actor="bob", reason="its data is wrong")
    add(engine, failed(PYTHON), at=NOW.replace(hour=13))
    hold(engine, JAVA, **WHO)
    unhold(engine, JAVA, now=NOW, **WHO)
    assert kept not in claimed(engine)
    assert decisions(engine)[PYTHON][0] is True


def test_note_owner_tags_and_acknowledgement_are_of_both(engine: Engine) -> None:
    add(engine, failed(JAVA), failed(PYTHON))
    noted = note(engine, PYTHON, text="the tenant is gone", owner="bob", tags=["billing"], actor="ann")
    acknowledge(engine, JAVA, more=3, **WHO)
    expected = (False, "the tenant is gone", "bob", ["billing"], "ann")
    assert decisions(engine) == {JAVA: expected, PYTHON: expected}
    undo(engine, noted.action, **WHO)
    assert decisions(engine) == dict.fromkeys((JAVA, PYTHON), (False, None, None, [], "ann"))


def test_an_acknowledgement_counts_what_comes_in_either_dialect(engine: Engine) -> None:
    add(engine, failed(JAVA), failed(PYTHON))
    acknowledge(engine, JAVA, more=3, now=NOW, **WHO)
    later = NOW.replace(minute=1)
    add(engine, failed(JAVA), failed(PYTHON), at=later)
    assert [line.state for line in inbox(engine, Filters(), now=later).lines] == [GroupState.ACKNOWLEDGED]
    add(engine, failed(PYTHON), at=later)
    assert [line.state for line in inbox(engine, Filters(), now=later).lines] == [GroupState.NEW]


def test_groups_are_compared_by_looks_at_an_index(engine: Engine) -> None:
    fill(engine, 5_000, due=0)
    add(engine, *(failed(JAVA, origin_queue="queue-1") for _ in range(50)), failed(PYTHON, origin_queue="queue-1"))
    with statements_of(engine) as statements, reading(engine) as connection:
        assert groups_alike(connection, JAVA, "queue-1") == [PYTHON]
    looks = [each for each in statements if "dlq_counts" not in each[0]]
    assert looks
    assert [plan for each in looks if (plan := walk(engine, *each))] == []
