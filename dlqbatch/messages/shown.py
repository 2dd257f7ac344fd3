"""What is shown of a message: masked, unless somebody who may see its content asks for it and gives a reason.

The stored bytes never change. Masks are made here, in the process of whoever looks: `docs/security.md` says what that
keeps from whom.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Final

from sqlalchemy import Connection, column, insert, literal, select, table, text

from dlqbatch.amqp.packed import Unpacked
from dlqbatch.amqp.readable import BodyForm, Readable
from dlqbatch.errors import DlqbatchError
from dlqbatch.ingest.dialects import read_dramatiq
from dlqbatch.logs import masked, masking
from dlqbatch.messages.content import ShownContent, shown_content
from dlqbatch.messages.queries import Attempt, Content, Detail, Record, Transition
from dlqbatch.messages.timeline import Step, timeline
from dlqbatch.store.bulk import in_list
from dlqbatch.store.column_types import Time
from dlqbatch.store.journal import REVEALED
from dlqbatch.store.tables import MESSAGES, TRANSITIONS
from dlqbatch.store.text import json_ready

_M: Final = MESSAGES.c
# On PostgreSQL a view, which lets a login write such lines of the journal and no others; that is the right to reveal.
_COLUMNS: Final = ("message_id", "from_status", "to_status", "at", "actor", "reason")
_REVEALS: Final = table("dlq_reveals", *map(column, _COLUMNS))
_MAY: Final = text("SELECT has_table_privilege('dlq_reveals', 'INSERT')")
_TEXTS: Final = (
    *("message_id", "exchange", "routing_key", "origin_exchange", "origin_key", "event", "reason", "source"),
    *("error_type", "error_message", "error_stack"),
)


@dataclass(frozen=True, slots=True)
class Reveal:
    """Who wants to see content unmasked, and why."""

    actor: str
    reason: str


class MayNotReveal(DlqbatchError):
    """This login may not see the content of messages unmasked."""

    exit_code = 1

    def __init__(self) -> None:
        super().__init__(
            "this login may not see content unmasked, and nothing was shown. The owner of the tables gives the right "
            "with GRANT dlqbatch_revealer TO the login; see docs/permissions.md"
        )


def reveal(connection: Connection, row_ids: Iterable[int], by: Reveal, now: datetime) -> None:
    """Write into the journal of each message who sees it unmasked; MayNotReveal without the right.

    Whoever may read an SQLite file may see what is in it.
    """
    is_postgresql = connection.dialect.name == "postgresql"
    if is_postgresql and not connection.scalar(_MAY):
        raise MayNotReveal
    line = (literal(now, Time), literal(by.actor), literal(f"{REVEALED}{by.reason}"))
    rows = select(_M.id, _M.status, _M.status, *line).where(in_list(connection, _M.id, list(row_ids)))
    connection.execute(insert(_REVEALS if is_postgresql else TRANSITIONS).from_select(_COLUMNS, rows))


def masked_record(record: Record) -> Record:
    """The record with the secrets hidden that its texts hold."""
    rules = masking()
    held = {name: getattr(record, name) for name in _TEXTS}
    hidden = {name: rules.value(value) for name, value in held.items() if value}
    return replace(record, **hidden, tags=rules.value(record.tags), system_state=rules.fields(record.system_state))


@dataclass(frozen=True, slots=True)
class Shown:
    record: Record
    content: Content
    attempts: tuple[Attempt, ...]
    transitions: tuple[Transition, ...]
    timeline: tuple[Step, ...]
    shown_content: ShownContent
    stack_note: str
    """What a reader of the stack has to know; empty if there is nothing."""
    is_masked: bool
    """Something is hidden: `content` and the rest are what may be shown, not what is stored."""
    plan: str | None = None
    """The hash of the replay plan that has reserved it, or is sending it."""

    @property
    def readable(self) -> Readable:
        return self.shown_content.readable

    @property
    def body_form(self) -> BodyForm:
        return self.shown_content.form

    def body_lines(self) -> Iterator[str]:
        return self.shown_content.body_lines()

    def as_dict(self) -> dict[str, object]:
        """Everything there is, the body exactly if nothing is masked."""
        content: dict[str, object] = {
            "properties": dict(self.readable.properties),
            "headers": dict(self.readable.headers),
            "properties_readable": self.readable.is_whole,
            "properties_base64": None if self.is_masked else b64encode(self.content.properties).decode(),
            "body_form": self.body_form,
            "body_base64": b64encode(self.content.body).decode(),
            **unpacked_as_dict(self.shown_content.unpacked),
            "attempts": json_ready(self.attempts),
            "transitions": json_ready(self.transitions),
            "timeline": json_ready(self.timeline),
            "plan": self.plan,
            "masked": self.is_masked,
        }
        return {field.name: json_ready(getattr(self.record, field.name)) for field in fields(self.record)} | content


def shown(detail: Detail, plan: str | None = None, *, is_revealed: bool = False) -> Shown:
    """What a person sees of a message: masked, unless it is revealed."""
    record, content, transitions = detail.record, detail.content, detail.transitions
    held, steps = shown_content(content.properties, content.body, is_revealed=is_revealed), timeline(detail)
    is_masked = False
    if not is_revealed:
        is_masked = held.is_masked or masked_record(record) != record
        content, record = replace(content, body=held.unpacked.body), masked_record(record)
        steps = tuple(
            replace(each, what=masked(each.what), reason=each.reason and masked(each.reason)) for each in steps
        )
        transitions = tuple(replace(each, reason=masked(each.reason)) for each in transitions)
    return Shown(
        record, content, detail.attempts, transitions, steps, held, stack_note(detail.content.body), is_masked, plan
    )


def stack_note(body: bytes) -> str:
    """What a reader of the stack of a message with this body has to know."""
    return _OF_RETRY if read_dramatiq(body) is not None else ""


def unpacked_as_dict(unpacked: Unpacked) -> dict[str, object]:
    """How the body was packed, and what was in it; null where it was not packed."""
    is_packed = bool(unpacked.packings)
    return {
        "body_packed": list(unpacked.packings),
        "body_unpacked_base64": b64encode(unpacked.body).decode() if is_packed else None,
        "body_unpacked_whole": unpacked.is_whole if is_packed else None,
    }


_OF_RETRY: Final = "why its framework retried it for the last time; what it died of after that is written nowhere"
