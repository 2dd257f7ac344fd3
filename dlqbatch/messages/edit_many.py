"""Edit many messages as one action: the same changes in the body and headers of each, and all else byte for byte."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from functools import partial
from typing import Any, Final

from sqlalchemy import Connection, Engine

from dlqbatch import logs
from dlqbatch.amqp import json_edit, json_path
from dlqbatch.amqp.fields import Fields
from dlqbatch.amqp.json_edit import CannotChange, Difference
from dlqbatch.amqp.masking import MASK
from dlqbatch.amqp.readable import readable
from dlqbatch.messages.changes import Change, Changes, Outcome, change_many
from dlqbatch.messages.edit import (
    EditRefused,
    HeaderEdits,
    NotEditable,
    Replacing,
    check_body,
    edit_headers,
    editable,
    put_in_their_place,
)
from dlqbatch.messages.selection import Split, check_number, choose
from dlqbatch.store.access import StoreClock
from dlqbatch.store.action_log import ActionRow, Request, check_person
from dlqbatch.store.filters import Filters, NoSuchMessage, NotUnderstood
from dlqbatch.store.states import Status
from dlqbatch.store.text import json_ready

_BYTES_AT_ONCE: Final = 16 * 1024 * 1024
AT_ONCE: Final = 50
"""Messages of one transaction, each of which may be large."""
EDITED: Final = (Status.PENDING, Status.MANUAL, Status.FAILED)
"""The states of messages that a filter without a state means."""
_LONGEST_PATCH: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Edits:
    """What is to be changed in each message."""

    values: tuple[tuple[tuple[str | int, ...], str], ...] = ()
    """Paths in the body, and the JSON texts that are to stand there."""
    patch: str | None = None
    """A JSON merge patch for the body."""
    headers: HeaderEdits = field(default_factory=HeaderEdits)

    def body(self, body: bytes) -> tuple[bytes, list[Difference]]:
        """The body with the changes; EditRefused if it has no place for one of them."""
        if not self.values and self.patch is None:
            return body, []
        mark = BOM_UTF8 if body.startswith(BOM_UTF8) else b""
        try:
            text = body[len(mark) :].decode()
        except UnicodeDecodeError:
            raise EditRefused("its body is no UTF-8 text: it is packed, or no JSON") from None
        differences: list[Difference] = []
        try:
            for steps, value in self.values:
                text, more = json_edit.set_value(text, steps, value)
                differences += more
            if self.patch is not None:
                text, more = json_edit.merge(text, self.patch)
                differences += more
        except CannotChange as error:
            raise EditRefused(str(error)) from None
        return mark + text.encode(), differences

    def as_dict(self) -> dict[str, object]:
        """For the action: what was changed, with secrets masked."""
        shown = [f"{json_edit.shown(steps)}={value}" for steps, value in self.values]
        found: dict[str, object] = {"set": [logs.masked(each) for each in shown]} if shown else {}
        found |= {"merge_patch": logs.masking().body(self.patch.encode()).decode()} if self.patch is not None else {}
        return found | ({"headers": list(self.headers.names)} if self.headers.wanted else {})


def edits(values: Iterable[str] = (), patch: bytes | None = None, headers: HeaderEdits | None = None) -> Edits:
    """What somebody wrote: `body.currency="EUR"`, and a JSON merge patch; EditRefused where it cannot be meant."""
    wanted: list[tuple[tuple[str | int, ...], str]] = []
    for each in values:
        place, equals, value = each.partition("=")
        if not equals:
            raise EditRefused(f"--set {each}: write it as --set body.path=VALUE")
        try:
            each.encode()
            steps = json_path.parse("$" + place.strip().removeprefix("body"))
            plain = tuple(step for step in steps if isinstance(step, str | int))
            if len(plain) != len(steps):
                raise EditRefused(f"--set {each}: one place at once, without * and ..")
            wanted.append((plain, json_edit.json_value(value)))
        except CannotChange as error:
            raise EditRefused(f"--set {place}: {error}") from None
        except ValueError:
            raise EditRefused(f"--set {each!r} names no path; write it as body.lines[0].sku=VALUE") from None
    text = None
    if patch is not None:
        if len(patch) > _LONGEST_PATCH:
            raise EditRefused(f"the merge patch is larger than {_LONGEST_PATCH:,} bytes")
        try:
            text = json_edit.json_value(patch.decode())
            json_edit.merge("{}", text)
        except (CannotChange, UnicodeDecodeError):
            raise EditRefused(
                f"the merge patch is no JSON object, or it is nested deeper than {json_edit.DEEPEST_PATCH} objects"
            ) from None
    found = Edits(tuple(wanted), text, HeaderEdits() if headers is None else headers)
    if not found.values and found.patch is None and not found.headers.wanted:
        raise EditRefused("nothing says what to change: give --set, --merge-patch, --set-header or --remove-header")
    return found


@dataclass(frozen=True, slots=True)
class EditedMessage:
    id: int
    new: int | None
    """The message that took its place; None on a dry run, and where it was refused."""
    before: Status | None
    is_done: bool
    why: str
    """Why it was refused."""
    differences: tuple[Difference, ...]
    """What is masked elsewhere is masked here."""


@dataclass(frozen=True, slots=True)
class ManyEdited:
    messages: tuple[EditedMessage, ...]
    dry_run: bool
    action: str | None
    """What undoes it, and what selects the edits: `dlqbatch replay plan --action A-17`."""
    split: Split | None

    @property
    def done(self) -> int:
        return sum(each.is_done for each in self.messages)

    @property
    def not_done(self) -> int:
        return len(self.messages) - self.done

    def as_dict(self) -> dict[str, object]:
        messages = []
        for each in self.messages:
            shown = {name.name: json_ready(getattr(each, name.name)) for name in fields(each)}
            messages.append(shown | {"differences": [difference._asdict() for difference in each.differences]})
        return {
            "dry_run": self.dry_run,
            "action": self.action,
            "done": self.done,
            "not_done": self.not_done,
            **({} if self.split is None else {"split": self.split.as_dict()}),
            "messages": messages,
        }


_FIELDS: Final = Fields()


def edit_many(
    engine: Engine,
    wanted: Edits,
    row_ids: Sequence[int] = (),
    filters: Filters | None = None,
    *,
    actor: str,
    reason: str,
    expect: int | None = None,
    force: bool = False,
    now: datetime | None = None,
    dry_run: bool = False,
    verified: bool = False,
    fields: Fields = _FIELDS,
) -> ManyEdited:
    """Put an edit in the place of each of these messages; what cannot be edited stays, with the reason.

    Without a status a filter means what is pending, manual or failed. More than a hundred that it matches are edited
    only where `expect` is their number. Nothing is sent.
    """
    check_person(actor, reason)
    filters = None if filters == Filters() else filters
    if bool(row_ids) == (filters is not None):
        raise NotUnderstood("name messages by their ids, or by a filter. Nothing was changed.")
    now = StoreClock(engine)() if now is None else now
    chosen = None if filters is None else choose(engine, filters, EDITED)
    if chosen is not None and (not dry_run or expect is not None):
        check_number(chosen.split, expect)
    found: list[EditedMessage] = []
    shown = {"ids": len(row_ids)} if filters is None else filters.shown()
    request = Request("edit", actor, reason, verified, shown, wanted.as_dict())
    some = partial(
        _edit_some,
        wanted=wanted,
        fields=fields,
        actor=actor,
        reason=reason,
        now=now,
        force=force,
        dry_run=dry_run,
        found=found,
    )
    ids = dict.fromkeys(row_ids) if chosen is None else chosen.row_ids
    done: Changes = change_many(engine, ids, request, now, some, dry_run=dry_run, at_once=AT_ONCE)
    return ManyEdited(tuple(found), dry_run, done.action, None if chosen is None else chosen.split)


def _edit_some(
    connection: Connection,
    row_ids: Sequence[int],
    *,
    wanted: Edits,
    fields: Fields,
    actor: str,
    reason: str,
    now: datetime,
    force: bool,
    dry_run: bool,
    found: list[EditedMessage],
) -> list[Outcome]:
    messages: dict[int, EditedMessage] = {}
    rows: dict[int, tuple[ActionRow, ...]] = {}
    waiting: list[Replacing] = []

    def put() -> None:
        for done, lines in put_in_their_place(connection, waiting, now, actor, reason, fields):
            messages[done.original], rows[done.original] = replace(messages[done.original], new=done.id), lines
        waiting.clear()

    # In the order of their ids: two edits that share messages would wait for each other otherwise.
    for row_id in sorted(row_ids):
        messages[row_id], rows[row_id], replacing = _edit_one(connection, row_id, wanted, force=force, dry_run=dry_run)
        if replacing is not None and not dry_run:
            waiting.append(replacing)
        if sum(len(each.body) for each in waiting) > _BYTES_AT_ONCE:
            put()
    if waiting:
        put()
    found += messages.values()
    return [
        Outcome(
            Change(row_id, each.before if each.is_done else None, each.before, is_done=each.is_done, why=each.why),
            rows[row_id],
        )
        for row_id, each in messages.items()
    ]


def _edit_one(
    connection: Connection, row_id: int, wanted: Edits, *, force: bool, dry_run: bool
) -> tuple[EditedMessage, tuple[ActionRow, ...], Replacing | None]:
    row: Any = None
    try:
        row = editable(connection, row_id, lock=not dry_run, force=force)
        properties = edit_headers(row.properties, wanted.headers)
        body, differences = wanted.body(row.body)
        if body != row.body:
            check_body(row.body, body, row.properties, force=force)
        why = "it is like that already" if (body, properties) == (row.body, row.properties) else ""
    except NoSuchMessage:
        why = "there is no such message"
        return EditedMessage(row_id, None, None, is_done=False, why=why, differences=()), (), None
    except (NotEditable, EditRefused) as error:
        why = error.why
    if why:
        status = None if row is None else row.status
        refused = ActionRow(row_id, "refused", status, status, why)
        return EditedMessage(row_id, None, status, is_done=False, why=why, differences=()), (refused,), None
    shown = (*_masked(differences, row.body, body), *_headers(wanted.headers, row.properties, properties))
    changed = tuple(difference.path for difference in shown)
    done = EditedMessage(row_id, None, row.status, is_done=True, why="", differences=shown)
    rows = (ActionRow(row_id, "done", row.status, Status.ARCHIVED),)
    return done, rows, Replacing(row, changed, body, properties)


def _masked(differences: Iterable[Difference], before: bytes, after: bytes) -> list[Difference]:
    """Differences as they are shown: a secret is one by its place, so whole bodies are masked."""
    differences = list(differences)
    if not differences:
        return []
    texts = [logs.masking().body(body).decode("utf-8-sig") for body in (before, after)]

    def at(text: str, difference: Difference, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            steps = json_path.parse("$" + difference.path.removeprefix("body"))
            return json_edit.text_at(text, [step for step in steps if isinstance(step, str | int)])
        except ValueError:
            return MASK

    return [
        Difference(each.path, at(texts[0], each, each.before), at(texts[1], each, each.after)) for each in differences
    ]


def _headers(wanted: HeaderEdits, before: bytes, after: bytes) -> list[Difference]:
    was, now = (logs.masking().fields(dict(readable(each).headers)) for each in (before, after))
    return [
        Difference(f"header {name}", _text(was.get(name)), _text(now.get(name)))
        for name in wanted.names
        if readable(before).headers.get(name) != readable(after).headers.get(name)
    ]


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
