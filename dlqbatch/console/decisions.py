"""Decisions about messages: discard and restore with the split and the number to type, and the edit of one message."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, urlencode

from starlette.responses import Response

from dlqbatch.amqp.fields import Fields
from dlqbatch.console.addresses import LONGEST, chips, filter_pairs, filters_of
from dlqbatch.console.messages import numbers, reveal_by
from dlqbatch.console.pages import shown
from dlqbatch.logs import plain
from dlqbatch.messages.changes import Change, Changes
from dlqbatch.messages.edit import Editing, as_meant, header_edits
from dlqbatch.messages.edit_many import EditedMessage, ManyEdited
from dlqbatch.messages.queries import WAITING
from dlqbatch.messages.selection import Split, check_number, choose, named
from dlqbatch.store.filters import Filters, NotUnderstood
from dlqbatch.store.states import Status

if TYPE_CHECKING:
    from dlqbatch.console.gate import Call

_LONGEST_DIFF: Final = 400
_REFUSED_SHOWN: Final = 50
_DIGITS: Final = 12


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a form or an address selects: ids, or a filter in the words of an address."""

    filters: Filters
    row_ids: tuple[int, ...]
    pairs: list[tuple[str, str]]

    @property
    def query(self) -> str:
        return urlencode(self.pairs)

    @property
    def place(self) -> str:
        """The page of these messages, if its address is not too long."""
        query = self.query or urlencode([("id", row_id) for row_id in self.row_ids])
        return f"/messages?{query}" if len(query) <= LONGEST else "/messages"


Act = Callable[[Chosen, str, int], Changes]
"""Changes what was chosen, for a reason, if there are so many."""


def chosen(call: Call) -> Chosen:
    """Ids alone name messages, each of which is done or refused; beside other conditions they are one of these."""
    pairs = filter_pairs([*call.query(), *parse_qsl(call.one("query"))])
    row_ids = numbers(" ".join([call.one("ids"), *call.all("id"), *(value for name, value in pairs if name == "id")]))
    if any(name != "id" for name, _ in pairs):
        if call.one("ids").strip():
            raise NotUnderstood("name messages by their ids or by a filter, not both. Nothing was changed.")
        return Chosen(filters_of(pairs), (), pairs)
    return Chosen(Filters(), row_ids, [])


def some(call: Call, what: str) -> Chosen:
    """What is chosen; NotUnderstood if that is nothing, which would be everything."""
    found = chosen(call)
    if not found.row_ids and not found.pairs:
        raise NotUnderstood(f"nothing says which messages to {what}: filter or select some first. Nothing was changed.")
    return found


def ask_discard(call: Call) -> Response:
    return _ask(call, "discard", WAITING)


def ask_restore(call: Call) -> Response:
    return _ask(call, "restore", (Status.ARCHIVED,))


def _ask(call: Call, what: str, statuses: tuple[Status, ...]) -> Response:
    found = some(call, what)
    return call.page(
        "decide.html",
        back=found.place,
        what=what,
        split=split_of(call, found, statuses),
        ids=" ".join(map(str, found.row_ids)),
        query=found.query,
        chips=chips(found.pairs),
    )


def split_of(call: Call, found: Chosen, statuses: tuple[Status, ...]) -> Split:
    engine = call.console.engine
    return (named(engine, found.row_ids) if found.row_ids else choose(engine, found.filters, statuses)).split


def discard(call: Call) -> Response:
    if call.one("step") == "ask":
        return ask_discard(call)
    messages = call.console.messages

    def act(found: Chosen, reason: str, number: int) -> Changes:
        filters, expect = (None, None) if found.row_ids else (found.filters, number)
        return messages.discard(
            found.row_ids, filters, actor=call.actor, reason=reason, expect=expect, verified=call.is_verified
        )

    return _decide(call, ("discard", "discarded"), WAITING, act)


def restore(call: Call) -> Response:
    if call.one("step") == "ask":
        return ask_restore(call)
    messages = call.console.messages

    def act(found: Chosen, reason: str, _: int) -> Changes:
        filters = None if found.row_ids else found.filters
        return messages.restore(found.row_ids, filters, actor=call.actor, reason=reason, verified=call.is_verified)

    return _decide(call, ("restore", "restored"), (Status.ARCHIVED,), act)


def _decide(
    call: Call, words: tuple[str, str], statuses: tuple[Status, ...], act: Callable[[Chosen, str, int], Changes]
) -> Response:
    """Act if the number that was typed is still the number of messages, and show what became of each."""
    found = some(call, words[0])
    reason, number = typed(call, found, statuses)
    return decided(call, found, words[1], act(found, reason, number))


def typed(call: Call, found: Chosen, statuses: tuple[Status, ...]) -> tuple[str, int]:
    """The reason and the number of messages that somebody typed, which is their number at this moment."""
    reason = call.one("reason").strip()
    if not reason:
        raise NotUnderstood("a reason is needed: it goes into the journal. Nothing was changed.")
    number = _typed_number(call)
    check_number(split_of(call, found, statuses), number)
    return reason, number


def check_typed(call: Call, expected: int) -> None:
    """NotUnderstood unless somebody typed this number of messages."""
    if (number := _typed_number(call)) != expected:
        raise NotUnderstood(f"{number:,} is not the number of messages, which is {expected:,}. Nothing was changed.")


def _typed_number(call: Call) -> int:
    number = call.one("number").replace(",", "").strip()
    if not number.isascii() or not number.isdigit() or len(number) > _DIGITS:
        raise NotUnderstood(f"'{shown(number, 40)}' is not the number of messages. Nothing was changed.")
    return int(number)


def decided(call: Call, found: Chosen, word: str, done: Changes | ManyEdited) -> Response:
    """To the messages, or if some are refused a page that says why; both offer to undo it."""
    each: Sequence[Change | EditedMessage] = done.changes if isinstance(done, Changes) else done.messages
    refused = [one for one in each if not one.is_done]
    call.note(
        "done",
        action=done.action,
        done=done.done,
        refused=len(refused),
        query=found.query[:LONGEST],
        ids=list(found.row_ids[:100]),
    )
    call.console.snapshots.forget()
    is_edit = isinstance(done, ManyEdited)
    if not refused:
        place = f"/messages/{found.row_ids[0]}" if len(found.row_ids) == 1 else found.place
        if is_edit:
            # What the edit made: from there its replay is planned.
            place = f"/messages?action={done.action}"
        return call.to(place, f"{done.done:,} {word}, 0 refused.", done.action)
    return call.page(
        "decided.html", word=word, done=done, is_edit=is_edit, refused=refused[:_REFUSED_SHOWN], more=len(refused)
    )


def ask_edit(call: Call) -> Response:
    """The body as text, unmasked, which stands in the journal; what is no text is edited with the command line."""
    row_id = call.number("id")
    original = Editing(call.console.engine, Fields(call.console.settings.fields)).original(row_id, reveal_by(call))
    call.note("done", message=row_id)
    return call.page(
        "edit.html",
        row_id=row_id,
        form=original.form,
        body=_text(original.body),
        diff=[],
        headers="",
        remove="",
        reason="",
    )


def edit(call: Call) -> Response:
    """With `step=look` the differences are shown, and nothing is saved; with `step=save` the edit is made."""
    row_id, editing = call.number("id"), Editing(call.console.engine, Fields(call.console.settings.fields))
    original = editing.original(row_id, reveal_by(call))
    # A form sends its lines with CR LF, whatever they were before.
    typed = call.one("body").replace("\r\n", "\n").encode()
    text = original.body.decode() if original.form != "hex" else ""
    is_untouched = original.form == "hex" or typed.decode() == text.replace("\r\n", "\n")
    body = None if is_untouched else as_meant(original.body, typed)
    headers = header_edits(pairs(call.one("headers")), call.one("remove").split())
    reason = call.one("reason").strip()
    saves = call.one("step") == "save"
    if saves and not reason:
        raise NotUnderstood("a reason is needed: it goes into the journal. Nothing was changed.")
    done = editing.edit(
        row_id,
        verified=call.is_verified,
        actor=call.actor,
        reason=reason or "look",
        body=body,
        headers=headers,
        dry_run=not saves,
    )
    if done.id is None:
        return call.page(
            "edit.html",
            row_id=row_id,
            form=original.form,
            body=call.one("body"),
            diff=[*(f"  {each}" for each in done.changed if each != "body"), *_diff(original.body, body)],
            headers=call.one("headers"),
            remove=call.one("remove"),
            reason=reason,
        )
    call.note("done", message=row_id, edit=done.id)
    call.console.snapshots.forget()
    notice = f"Message {done.id} has taken the place of message {row_id}, which is archived. It waits for a replay."
    return call.to(f"/messages/{done.id}", notice, done.action)


def _text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError:
        return ""


def pairs(text: str) -> list[tuple[str, str]]:
    found = [(name.strip(), value.strip()) for name, _, value in (line.partition("=") for line in text.splitlines())]
    if any(not name for name, value in found if name or value):
        raise NotUnderstood("a header is a line of NAME=VALUE. Nothing was changed.")
    return [pair for pair in found if pair[0]]


def _diff(before: bytes, after: bytes | None) -> list[str]:
    if after is None:
        return []
    old, new = (_text(body).splitlines() for body in (before, after))
    found = [
        line for line in difflib.unified_diff(old, new, lineterm="", n=2) if not line.startswith(("---", "+++", "@@"))
    ]
    return [plain(line, 1_000) for line in found[:_LONGEST_DIFF]]
