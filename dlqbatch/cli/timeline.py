"""How one dead message is shown: facts, timeline, stack, headers and body."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from dlqbatch.logs import plain

if TYPE_CHECKING:  # they need SQLAlchemy, which `archive list` does not
    from dlqbatch.messages.queries import Record
    from dlqbatch.messages.shown import Shown
    from dlqbatch.messages.timeline import Step

_MARKS: Final = {"death": "✗", "state": "●", "attempt": "→", "note": "·"}
_TIME: Final = "%Y-%m-%d %H:%M:%S"
_TIME_WIDTH: Final = 19
_LINES_OF_BODY: Final = 40
_PROCESSING: Final = ("being sent", "sent; whether it comes back is being observed")
_LONGEST_LINE: Final = 2_000
_LONGEST_CELL: Final = 2_000


def error(record: Record, longest: int) -> str:
    """In one line. Where nobody tells an error, nor where it failed, the queue that it was taken from."""
    said = ": ".join(part for part in (record.error_type, record.error_message) if part)
    if not said and not (record.origin_queue or record.origin_exchange):
        said = f"not told; taken from '{record.source_queue}'"
    return plain(said.partition("\n")[0], longest)


def message(shown: Shown, first: Mapping[str, object] | None = None, *, full: bool) -> Iterator[str]:
    """The lines for a message of the dead store or a cold copy; the facts of `first` stand before its own."""
    record, readable = shown.record, shown.readable
    yield f"Message {record.id}"
    if shown.is_masked:
        yield "  Secrets are masked (***); --reveal --reason TEXT shows them, and is journalled."
    is_sent = any(each.sent_at is not None and each.closed_at is None for each in shown.attempts)
    yield from facts({**(first or {}), **_known(record, shown.plan, is_sent=is_sent)}, full=full)
    yield from ("", "Timeline (UTC)")
    yield from ("  " + line for line in timeline(shown.timeline))
    if record.error_stack:
        yield from ("", "Stack")
        if shown.stack_note:
            yield f"  ({shown.stack_note})"
        yield from text(record.error_stack.splitlines(), full=full)
    for title, held in (("Properties", readable.properties), ("Headers", readable.headers)):
        if held:
            yield from ("", title)
            yield from values(_without_stack(held, record.error_stack), full=full)
    if not readable.is_whole:
        yield from ("", "Not all of its properties and headers could be read; --json --reveal holds their bytes.")
    yield from ("", f"Body ({record.body_size:,} bytes, {shown.body_form}{shown.shown_content.packing})")
    yield from text(shown.body_lines(), full=full)


def _without_stack(headers: Mapping[str, object], stack: str | None) -> Mapping[str, object]:
    """The headers, with a note in place of the stack, which is shown above them."""
    if not stack:
        return headers
    return {name: "(see Stack)" if value == stack else value for name, value in headers.items()}


def _known(record: Any, plan: str | None, *, is_sent: bool) -> dict[str, object]:
    meaning = f" ({_PROCESSING[is_sent]})" if record.status == "processing" else ""
    return {
        "status": f"{record.status}{meaning} since {time(record.status_since)} UTC",
        "held by": record.lock_owner,
        "lease until": "" if is_sent else time(record.lease_until),
        "next retry": time(record.next_retry_at),
        "strategy": record.strategy,
        "identity": record.identity,
        "parent": record.parent,
        "message id": record.message_id,
        "origin queue": record.origin_queue,
        "origin exchange": record.origin_exchange,
        "event": record.event,
        "taken from": record.source_queue,
        "group": record.fingerprint,
        "reason": record.reason,
        "error type": record.error_type,
        "error": record.error_message,
        "retries": f"{record.retry_count} before it died, {record.dlq_retry_count} from the store",
        "priority": record.priority,
        "tags": " ".join(map(str, record.tags)),
        "source": record.source,
        "replay plan": plan,
        "system": dict(record.system_state),
        "doubtful": "it may be here twice" if record.possible_duplicate else None,
    }


def time(at: datetime | None) -> str:
    """The time in whole seconds, or an empty text."""
    return at.strftime(_TIME) if at is not None else ""


def timeline(steps: Sequence[Step]) -> Iterator[str]:
    before: datetime | None = None
    for step in steps:
        if step.at is not None:
            if before is not None and step.at - before >= timedelta(seconds=1):
                yield f"{'':{_TIME_WIDTH}}  │ {_span(step.at - before)}"
            before = step.at
        who = f" [{plain(step.actor)}]" if step.actor else ""
        why = f": {plain(step.reason)}" if step.reason else ""
        yield f"{time(step.at):{_TIME_WIDTH}}  {_MARKS.get(step.kind, '·')} {plain(step.what)}{who}{why}"


def _span(length: timedelta) -> str:
    minutes, seconds = divmod(int(length.total_seconds()), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [f"{number} {unit}" for number, unit in ((days, "d"), (hours, "h"), (minutes, "min"), (seconds, "s"))]
    return " ".join([part for part in parts if not part.startswith("0 ")][:2])


def facts(known: Mapping[str, object], *, full: bool) -> Iterator[str]:
    """One line for each fact that is known."""
    return values({name: value for name, value in known.items() if value not in (None, "", [], {})}, full=full)


def values(shown: Mapping[str, object], *, full: bool) -> Iterator[str]:
    """One line for each property or header, also where its value is empty."""
    cells = {plain(name): _cell(value, full=full) for name, value in shown.items()}
    width = max(map(len, cells), default=0)
    for name, value in cells.items():
        yield f"  {name:{min(width, 32)}}  {value}"


def _cell(value: object, *, full: bool) -> str:
    text = value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False, default=str)
    return plain(text, None if full else _LONGEST_CELL)


def text(lines: Iterable[str], *, full: bool) -> Iterator[str]:
    """Lines without control characters; without `full` only the first of them."""
    shown = iter(lines)
    for line in islice(shown, None if full else _LINES_OF_BODY):
        yield "  " + plain(line.replace("\t", "    "), None if full else _LONGEST_LINE)
    if not full and next(shown, None) is not None:
        yield "  … and more: --full shows all of it"
