"""The states of a quorum queue's consumer: the drawing in the module and its table say the same."""

from __future__ import annotations

import re

from dlqbatch.broker import consume
from dlqbatch.broker.consume import MOVES, Event, State


def drawn() -> set[tuple[State, State]]:
    found: set[tuple[State, State]] = set()
    text = (consume.__doc__ or "").replace("any state", "|".join(State.__members__))
    for line in text.splitlines():
        for before, after in re.findall(r"(?<![A-Z|])(?=([A-Z|]+) -> ([A-Z]+))", line):
            found |= {(State[name], State[after]) for name in before.split("|")}
    return found


def test_the_drawing_and_the_table_say_the_same() -> None:
    assert drawn() == {move for moves in MOVES.values() for move in moves.items()}


def test_every_event_moves_and_every_state_but_the_last_two_is_left() -> None:
    assert set(MOVES) == set(Event)
    ended = {State.FINISHED, State.ENDING}
    left = {state for event, moves in MOVES.items() if event is not Event.RELEASE for state in moves}
    assert left == set(State) - ended


def test_a_late_answer_to_a_cancel_changes_nothing_once_the_channel_is_to_be_closed() -> None:
    assert State.ENDING not in MOVES[Event.CANCELLED]
    assert State.GETTING not in MOVES[Event.CANCELLED]
