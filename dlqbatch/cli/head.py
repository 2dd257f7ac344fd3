"""`dlqbatch ingest QUEUE --head`: take the message that kills the consumers of a queue, or show it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from dlqbatch.cli import timeline
from dlqbatch.cli.printing import PARTIAL, print_json, print_lines, print_table, remark
from dlqbatch.cli.run import on_signal
from dlqbatch.logs import masking, plain
from dlqbatch.messages.content import shown_content

if TYPE_CHECKING:  # it needs broker and database, which a help page does not
    from dlqbatch.ingest.head import Taken
    from dlqbatch.settings import Settings


def take(
    settings: Settings,
    queue: str,
    *,
    actor: str,
    reason: str,
    note: str | None,
    takes_any: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    from dlqbatch.ingest.head import take_head
    from dlqbatch.jobs import RunOptions

    options = RunOptions(dry_run=dry_run, stopped=on_signal())
    taken = take_head(settings, options, queue, actor=actor, reason=reason, note=note, takes_any=takes_any)
    if as_json:
        print_json(taken.as_dict())
    elif dry_run:
        print_lines(_shown(taken, queue, takes_any=takes_any))
    else:
        row = {"id": taken.id, "was": _was(taken), "status": taken.status, "group": taken.group, "action": taken.action}
        print_table([row | {"done": "taken, on hold"}])
        remark(
            f"`dlqbatch undo {taken.action}` lifts the hold; then `dlqbatch messages replay {taken.id}` sends it to "
            f"'{queue}' again"
        )
    if taken.warning:
        remark(taken.warning)
    return PARTIAL if taken.warning else 0


def _was(taken: Taken) -> str:
    if taken.attempt is not None:
        return f"attempt {taken.attempt} of message {taken.id}"
    return "stored before" if taken.is_known else "not sent by dlqbatch"


def _shown(taken: Taken, queue: str, *, takes_any: bool) -> Iterator[str]:
    """The message, masked."""
    message, rules = taken.message, masking()
    content = shown_content(message.properties, message.body)
    held = content.readable
    yield plain(f"At the head of '{queue}', where it still is")
    facts = {
        "is": _was(taken),
        "would be": "taken" if taken.attempt is not None or takes_any else "left there; --any takes it",
        "redelivered": "yes" if message.redelivered else "no: nobody has died of it",
        "exchange": message.exchange,
        "routing key": message.routing_key,
    }
    yield from timeline.facts({name: rules.value(value) for name, value in facts.items()}, full=False)
    for title, values in (("Properties", held.properties), ("Headers", held.headers)):
        yield from chain(("", title), timeline.values(values, full=False)) if values else ()
    yield from ("", f"Body ({len(message.body):,} bytes, {content.form}{content.packing})")
    yield from timeline.text(content.body_lines(), full=False)
