"""The pages Messages and Message: the address is the filter, and one message has its whole story on one page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, quote, urlencode

from sqlalchemy import func, select
from starlette.responses import Response

from dlqbatch.amqp.fields import BUILT_IN
from dlqbatch.amqp.readable import BodyForm
from dlqbatch.console.addresses import LONGEST, chips, command_words, filter_pairs, filters_of
from dlqbatch.console.pages import shown
from dlqbatch.lifecycle.rule_rows import Explanation, Rules
from dlqbatch.logs import plain
from dlqbatch.messages.actions import Listing
from dlqbatch.messages.queries import linked_by_edits
from dlqbatch.messages.shown import Reveal, Shown
from dlqbatch.store import counts, filter_conditions
from dlqbatch.store.counts import Where
from dlqbatch.store.engine import reading
from dlqbatch.store.filters import Filters, NotUnderstood
from dlqbatch.store.filters_on_counts import conditions_on_counts, states_of
from dlqbatch.store.states import Status
from dlqbatch.store.tables import MESSAGES

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from dlqbatch.console.gate import Call

PAGE: Final = 50
COUNTED: Final = 10_000
"""Above it a page says `more than`; a plan or a discard counts exactly."""
LINES: Final = 400
_DIGITS: Final = 18
_TRACE_PARTS: Final = 4
_TRACE: Final = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Count:
    number: int
    is_exact: bool


def listing(call: Call) -> Response:
    return _others(call) if call.one("but") else _listing(call, filter_pairs(call.query()))


def pasted(call: Call) -> Response:
    """The messages of a pasted list: at an address, or if that were too long at a form from page to page."""
    if call.one("but"):
        return _others(call)
    pairs, by, text = filter_pairs(parse_qsl(call.one("query"))), call.one("by").strip(), call.one("list")
    if by in {"", "id"}:
        pairs += [("id", str(number)) for number in numbers(" ".join([text, *call.all("id")]))]
    else:
        pairs += [("field", f"{by}={line.strip()}") for line in text.splitlines() if line.strip()]
    if not pairs:
        raise NotUnderstood("the list is empty: paste ids, or values of a field, one on each line")
    return _at_address(call, pairs)


def _others(call: Call) -> Response:
    """All that match but the selected."""
    pairs = filter_pairs(parse_qsl(call.one("of")))
    return _at_address(call, [*pairs, *(("not", f"id={number}") for number in numbers(" ".join(call.all("id"))))])


def _at_address(call: Call, pairs: list[tuple[str, str]]) -> Response:
    query = urlencode(pairs)
    return call.to(f"/messages?{query}") if len(query) <= LONGEST else _listing(call, pairs)


def _listing(call: Call, pairs: list[tuple[str, str]]) -> Response:
    filters, query = filters_of(pairs), urlencode(pairs)
    page = call.console.messages.page(filters, PAGE, call.one("after") or None)
    is_long = len(query) > LONGEST
    return call.page(
        "messages.html",
        page=page,
        count=count(call, filters, page),
        chips=chips(pairs),
        query=query,
        pairs=pairs,
        is_long=is_long,
        fields=[*BUILT_IN, *call.console.settings.fields],
        is_first=not call.one("after"),
        missing=call.console.messages.values_not_found(filters),
        near=call.console.messages.near(filters) if not page.messages else [],
        command="" if is_long else f"dlqbatch messages list {command_words(pairs)}".strip(),
        statuses=list(Status),
        texts=bool(filters.texts),
    )


def count(call: Call, filters: Filters, page: Listing) -> Count:
    """How many match: exactly where that is cheap; with a text what this page shows, for no index knows it."""
    if filters.texts:
        return Count(len(page.messages), is_exact=page.next is None and not call.one("after"))
    with reading(call.console.engine) as connection:
        if filters == Filters(statuses=filters.statuses):
            statuses = filters.statuses or tuple(Status)
            return Count(counts.number(connection, statuses, Where(lambda _: [])), is_exact=True)
        return _counted(connection, filters)


def _counted(connection: Connection, filters: Filters) -> Count:
    statuses = states_of(filters, tuple(Status))
    if statuses and (where := conditions_on_counts(connection, filters)) is not None:
        number = counts.number(connection, statuses, where)
        return Count(min(number, COUNTED), number <= COUNTED)
    conditions = filter_conditions.conditions(connection, filters) + filter_conditions.text_conditions(filters)
    some = select(MESSAGES.c.id).where(*conditions).limit(COUNTED + 1).subquery()
    number = int(connection.scalar(select(func.count()).select_from(some)) or 0)
    return Count(min(number, COUNTED), number <= COUNTED)


@dataclass(frozen=True, slots=True)
class Body:
    form: BodyForm
    lines: tuple[str, ...]
    is_cut: bool
    packed: str = ""
    """What was unpacked, in words; empty if nothing was."""


def one(call: Call) -> Response:
    return _message(call, reveal=False)


def reveal(call: Call) -> Response:
    """The same page with nothing masked; who looked is in the audit."""
    return _message(call, reveal=True)


def _message(call: Call, *, reveal: bool) -> Response:
    console, row_id = call.console, call.number("id")
    found = console.messages.show(row_id, reveal_by(call) if reveal else None)
    if reveal:
        call.note("done", message=row_id)
    with reading(console.engine) as connection:
        linked = linked_by_edits(connection, row_id)
    return call.page(
        "message.html",
        shown_message=found,
        record=found.record,
        body=body_of(found),
        explained=_explained(call, found),
        linked=linked,
        trace=trace_of(found),
        trace_url=_trace_url(console.settings.trace_url, trace_of(found)),
        is_revealed=reveal,
        where=_where(call, found),
        command=f"dlqbatch messages show {row_id}",
    )


def reveal_by(call: Call) -> Reveal:
    """Who sees it unmasked, and why: it stands in the journal of the message."""
    return Reveal(call.actor, call.one("reason").strip() or "looked at in the console")


def _explained(call: Call, found: Shown) -> Explanation:
    return Rules(call.console.engine).test_message(found.record.id)


def _where(call: Call, found: Shown) -> str:
    """Where the message is at this moment, as far as database and broker tell."""
    record = found.record
    is_sent = any(each.sent_at is not None and each.closed_at is None for each in found.attempts)
    if record.status != Status.PROCESSING:
        return "in the dead store"
    if not is_sent:
        return f"about to be sent by {shown(record.lock_owner)}"
    look, queue = call.console.live.watch.last, record.origin_queue or ""
    there = look.queues.get(queue) if look is not None else None
    if there is None:
        return f"sent to {shown(queue or record.origin_exchange)}; the broker does not tell more"
    return (
        f"sent to {shown(queue)}, which holds {there.ready:,} ready and "
        f"{'an unknown number of' if there.unacknowledged is None else f'{there.unacknowledged:,}'} unacknowledged"
    )


def body_of(found: Shown) -> Body:
    """The body to be read, unpacked and cut."""
    lines = list(islice(_cut(found.body_lines()), LINES + 1))
    return Body(found.body_form, tuple(lines[:LINES]), len(lines) > LINES, found.shown_content.packing)


def _cut(lines: Iterator[str]) -> Iterator[str]:
    """What may be shown of the body is decided already: here its lines are made harmless and cut."""
    return (plain(line, 1_000) for line in lines)


def trace_of(found: Shown) -> str | None:
    """The id of the trace, from the header `traceparent` (W3C)."""
    said = str(found.readable.headers.get("traceparent", ""))
    parts = said.split("-")
    return parts[1] if len(parts) == _TRACE_PARTS and _TRACE.fullmatch(parts[1]) else None


def _trace_url(pattern: str | None, trace: str | None) -> str:
    return pattern.replace("{trace}", quote(trace)) if pattern and trace else ""


def file(call: Call) -> Response:
    """The body as a file, unmasked, which is a right of its own; the browser is told to save it and not to show it."""
    row_id = call.number("id")
    found = call.console.messages.show(row_id, reveal_by(call))
    call.note("done", message=row_id)
    headers = {
        "Content-Disposition": f'attachment; filename="message-{row_id}.bin"',
        "Content-Security-Policy": "default-src 'none'; sandbox",
    }
    return Response(found.content.body, media_type="application/octet-stream", headers=headers)


def numbers(text: str) -> tuple[int, ...]:
    """Numbers of messages as a person pastes them, with commas, blanks or lines between them."""
    words = text.replace(",", " ").split()
    if any(not word.isascii() or not word.isdigit() or len(word) > _DIGITS for word in words):
        raise NotUnderstood("the numbers of messages are digits, with commas or blanks between them. Nothing was done.")
    return tuple(dict.fromkeys(int(word) for word in words))
