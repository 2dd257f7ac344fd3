"""Edit many messages: what is to change, the differences before they are saved, and the number of messages to type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from starlette.responses import Response

from dlqbatch.amqp.fields import Fields
from dlqbatch.console.addresses import chips
from dlqbatch.console.decisions import Chosen, decided, pairs, some, typed
from dlqbatch.messages.edit import EditRefused, header_edits
from dlqbatch.messages.edit_many import EDITED, EditedMessage, Edits, ManyEdited, edit_many, edits
from dlqbatch.messages.selection import choose, named
from dlqbatch.store.filters import Filters

if TYPE_CHECKING:
    from dlqbatch.console.gate import Call

TRIED: Final = 2_000
"""A page tries a change on so many of the newest messages before it is saved; saving says what became of each."""
_SHOWN: Final = 50


@dataclass(frozen=True, slots=True)
class Preview:
    """What a change would do, for the page."""

    done: int
    refused: Mapping[str, Sequence[int]]
    """The messages that each reason refuses."""
    shown: Sequence[EditedMessage]
    """The first messages that would be edited, with their differences."""
    is_complete: bool
    """False: only the newest messages were tried."""


def ask(call: Call) -> Response:
    return _page(call, some(call, "edit"))


def edit(call: Call) -> Response:
    """With `step=look` the differences are shown, and nothing is saved; with `step=save` the edits are made."""
    found = some(call, "edit")
    if call.one("step") == "ask":
        return _page(call, found)
    try:
        wanted = _wanted(call)
    except EditRefused as error:
        return _page(call, found, problem=str(error))
    if call.one("step") != "save":
        return _page(call, found, wanted)
    reason, number = typed(call, found, EDITED)
    if found.row_ids:
        return decided(call, found, "edited", _edit(call, wanted, found.row_ids, reason=reason))
    done = _edit(call, wanted, filters=found.filters, reason=reason, expect=number)
    return decided(call, found, "edited", done)


def _wanted(call: Call) -> Edits:
    values = [line.strip() for line in call.one("set").splitlines() if line.strip()]
    patch = call.one("patch").strip()
    headers = header_edits(pairs(call.one("headers")), call.one("remove").split())
    return edits(values, patch.encode() if patch else None, headers)


def _edit(
    call: Call,
    wanted: Edits,
    row_ids: Sequence[int] = (),
    *,
    filters: Filters | None = None,
    reason: str,
    expect: int | None = None,
    dry_run: bool = False,
) -> ManyEdited:
    return edit_many(
        call.console.engine,
        wanted,
        row_ids,
        filters,
        actor=call.actor,
        reason=reason,
        expect=expect,
        dry_run=dry_run,
        verified=call.is_verified,
        fields=Fields(call.console.settings.fields),
    )


def _page(call: Call, found: Chosen, wanted: Edits | None = None, problem: str = "") -> Response:
    """The form, with what the change would do once there is one."""
    engine = call.console.engine
    chosen = named(engine, found.row_ids) if found.row_ids else choose(engine, found.filters, EDITED)
    preview = None
    if wanted is not None and chosen.row_ids:
        newest = chosen.row_ids[:TRIED]
        tried = _edit(call, wanted, newest, reason="look", dry_run=True)
        refused: dict[str, list[int]] = {}
        for each in tried.messages:
            if not each.is_done:
                refused.setdefault(each.why, []).append(each.id)
        done = [each for each in tried.messages if each.is_done]
        preview = Preview(len(done), refused, done[:_SHOWN], is_complete=len(newest) == len(chosen.row_ids))
    return call.page(
        "edit_many.html",
        422 if problem else 200,
        back=found.place,
        split=chosen.split,
        ids=" ".join(map(str, found.row_ids)),
        query=found.query,
        chips=chips(found.pairs),
        preview=preview,
        tried=TRIED,
        problem=problem,
        **{name: call.one(name) for name in ("set", "patch", "headers", "remove", "reason")},
    )
