"""How the messages that a filter matches are divided, shown before or beside a change of all of them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from dlqbatch.cli.printing import remark
from dlqbatch.logs import plain

if TYPE_CHECKING:  # they need SQLAlchemy, which a help page does not
    from dlqbatch.cli.reach import Reach
    from dlqbatch.messages.selection import Split
    from dlqbatch.store.filters import Filters

_SHOWN: Final = 20


@contextmanager
def split_shown(*, as_json: bool) -> Iterator[None]:
    """Show the split, and the command to paste, where the number of messages is not the expected one."""
    from dlqbatch.messages.selection import NumberUnexpected

    try:
        yield
    except NumberUnexpected as error:
        if not as_json and error.split.total:
            print_split(error.split)
            words = [word for word in sys.argv[1:] if word != "--expect" and not word.startswith("--expect=")]
            if error.expected is not None and str(error.expected) in words:
                words.remove(str(error.expected))
            remark(f"if all of these are meant: {shlex.join(['dlqbatch', *words, '--expect', str(error.split.total)])}")
        raise


def print_split(split: Split) -> None:
    """Write it to stderr, beside the data."""
    remark(f"{split.total:,} match, by group and queue:")
    for (group, queue), number in split.groups.most_common(_SHOWN):
        remark(f"  {number:>9,}  {group}  {plain(queue or '')}".rstrip())
    if len(split.groups) > _SHOWN:
        remark(f"  … and {len(split.groups) - _SHOWN:,} more groups and queues")
    events = [f"{plain(event or 'none')} {number:,}" for event, number in split.events.most_common(_SHOWN)]
    more = f", and {len(split.events) - _SHOWN:,} more" if len(split.events) > _SHOWN else ""
    remark(f"events: {', '.join(events)}{more}")
    remark(f"states: {', '.join(f'{status} {number:,}' for status, number in split.states.most_common())}")
    remark(f"of these: {split.edits:,} edits, {split.under_way:,} under way, {split.reserved:,} reserved by a plan")


def say_what_is_near(reach: Reach, filters: Filters) -> None:
    from dlqbatch.messages.actions import MessageActions

    remark("nothing found")
    for sentence in reach.messages(MessageActions.near, filters):
        remark(sentence)


def say_what_is_missing(reach: Reach, filters: Filters) -> None:
    from dlqbatch.messages.actions import MessageActions

    for sentence in reach.messages(MessageActions.values_not_found, filters):
        remark(sentence)
