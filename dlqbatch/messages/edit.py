"""Edit a dead message: a new row takes its place, and the original is archived in the same transaction."""

from __future__ import annotations

import json
import secrets
from codecs import BOM_UTF8
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from struct import error as StructError  # noqa: N812  (struct names its exception in lower case)
from typing import Any, Final, NamedTuple, NoReturn

from sqlalchemy import Connection, Engine, select

from dlqbatch.amqp import headers as names
from dlqbatch.amqp import table as amqp_table
from dlqbatch.amqp.delivery import open_envelope
from dlqbatch.amqp.fields import Fields
from dlqbatch.amqp.identity import digest_of, header_digest, message_id_of
from dlqbatch.amqp.properties import labels, split
from dlqbatch.amqp.readable import BodyForm, body_form, readable
from dlqbatch.amqp.table import LONGEST_NAME, Field, UnreadableTable, encode_field, fields, to_bytes
from dlqbatch.errors import DlqbatchError
from dlqbatch.ingest.dialects import framework_id, read_dramatiq
from dlqbatch.messages.discard import former_columns
from dlqbatch.messages.shown import Reveal, reveal
from dlqbatch.store import action_log
from dlqbatch.store import journal as states
from dlqbatch.store.access import StoreClock
from dlqbatch.store.action_log import ActionRow, Request, StateChange, change_states, check_person, last_transitions
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.filters import LARGEST_ID, NoSuchMessage, action_name
from dlqbatch.store.journal import EDIT_OF, EDITED
from dlqbatch.store.reservation import holder
from dlqbatch.store.scopes import scope_of
from dlqbatch.store.states import Status
from dlqbatch.store.tables import MESSAGES

_M: Final = MESSAGES.c
# What the new row has in common with the original; its attempts and its life in the store are its own.
_KEPT: Final = (
    *("source_queue", "exchange", "routing_key", "message_id", "origin_queue", "origin_exchange", "origin_key"),
    *("moved_to", "event", "reason", "error_type", "error_message", "error_stack", "fingerprint", "retry_count"),
    *("first_failed_at", "last_failed_at", "priority", "tags", "source", "system_state", "possible_duplicate"),
)


_FIELDS: Final = Fields()


class NotEditable(DlqbatchError):
    """The message is in a state in which an edit could make it go out twice, or would be of no use."""

    def __init__(self, row_id: int, why: str) -> None:
        self.row_id, self.why = row_id, why
        super().__init__(f"message {row_id} cannot be edited: {why}. Nothing was changed.")


class NothingEdited(DlqbatchError):
    """What was to be changed is like that already."""

    def __init__(self, row_id: int) -> None:
        self.row_id = row_id
        super().__init__(f"message {row_id} is like that already, body and headers. Nothing was changed.")


@dataclass(frozen=True, slots=True)
class Original:
    body: bytes
    form: BodyForm


@dataclass(frozen=True, slots=True)
class Edited:
    original: int
    before: Status
    """The state of the original, which is archived now."""
    id: int | None
    """The new row, in manual; None on a dry run."""
    identity: str | None
    parent: str
    """The original's identity."""
    changed: tuple[str, ...]
    """`body`, and `header NAME`."""
    dry_run: bool
    action: str | None = None


class Editing:
    def __init__(self, engine: Engine, fields: Fields = _FIELDS) -> None:
        self._engine, self._fields = engine, fields

    def original(self, row_id: int, by: Reveal, *, force: bool = False) -> Original:
        """What there is to edit, unmasked and so journalled; NotEditable before anybody takes the trouble."""
        check_person(by.actor, by.reason)
        now = StoreClock(self._engine)()
        with writing(self._engine) as connection:
            body: bytes = editable(connection, row_id, lock=False, force=force).body
            reveal(connection, [row_id], by, now)
        return Original(body, body_form(body))

    def edit(
        self,
        row_id: int,
        *,
        actor: str,
        reason: str,
        now: datetime | None = None,
        body: bytes | None = None,
        headers: HeaderEdits | None = None,
        force: bool = False,
        dry_run: bool = False,
        verified: bool = False,
    ) -> Edited:
        """The new row is in manual: nothing goes out before a person replays it.

        Without a time it is the store's. Without a body that stays; `force` takes one that should be JSON and is not,
        and a message that is resolved.
        """
        check_person(actor, reason)
        headers = HeaderEdits() if headers is None else headers
        now = StoreClock(self._engine)() if now is None else now
        with (reading if dry_run else writing)(self._engine) as connection:
            row = editable(connection, row_id, lock=not dry_run, force=force)
            properties = edit_headers(row.properties, headers)
            changed = tuple(f"header {name}" for name in headers.names) if properties != row.properties else ()
            if body is not None and body != row.body:
                check_body(row.body, body, row.properties, force=force)
                changed = ("body", *changed)
            if not changed:
                raise NothingEdited(row_id)
            if dry_run:
                return Edited(row_id, row.status, None, None, row.identity, changed, dry_run)
            replacing = Replacing(row, changed, row.body if body is None else body, properties)
            ((done, rows),) = put_in_their_place(connection, [replacing], now, actor, reason, self._fields)
            request = Request("edit", actor, reason, verified, {"ids": 1}, {"changed": list(changed)})
            action_id = action_log.begin(connection, request, now, ended=True)
            action_log.add_rows(connection, action_id, rows)
            return replace(done, action=action_name(action_id))


class Replacing(NamedTuple):
    """A message that is locked, and what its edit has in place of its body and properties."""

    row: Any
    changed: tuple[str, ...]
    body: bytes
    properties: bytes


def put_in_their_place(
    connection: Connection, wanted: Sequence[Replacing], now: datetime, actor: str, reason: str, fields: Fields
) -> list[tuple[Edited, tuple[ActionRow, ActionRow]]]:
    """The new rows first: the originals' journal names them. They get ids in the order in which the originals came."""
    in_order = sorted(wanted, key=lambda each: (each.row.created_at, each.row.id))
    identities = sorted(secrets.token_hex(16) for _ in wanted)  # rows arrive in the order of their identities
    pairs = [(each, _replacement(each, new, fields)) for each, new in zip(in_order, identities, strict=True)]
    said = {new["identity"]: f"{EDIT_OF}{each.row.id} ({', '.join(each.changed)}): {reason}" for each, new in pairs}
    ids = states.arrive(connection, [new for _, new in pairs], now, actor, said)
    before = last_transitions(connection, [each.row.id for each in wanted])
    why = {each.row.id: f"{EDITED}{ids[new['identity']]} takes its place: {reason}" for each, new in pairs}
    originals = [each.row for each in wanted]
    changes = [StateChange(row.id, row.status, Status.ARCHIVED, row.lock_token, why[row.id]) for row in originals]
    change_states(connection, changes, now, actor)
    after = last_transitions(connection, [*why, *ids.values()])
    found = []
    for (row, changed, *_), new in pairs:
        new_id, last = ids[new["identity"]], before.get(row.id)
        old = ActionRow(row.id, "done", row.status, Status.ARCHIVED, None, former_columns(row), last, after[row.id])
        edit = ActionRow(new_id, "done", None, Status.MANUAL, last_after=after[new_id], edit_of=row.id)
        done = Edited(row.id, row.status, new_id, new["identity"], row.identity, changed, dry_run=False)
        found.append((done, (old, edit)))
    return found


def _replacement(wanted: Replacing, identity: str, fields: Fields) -> dict[str, Any]:
    row, body = wanted.row, wanted.body
    was = header_digest(message_id_of(row.properties), len(row.body), [row.body])
    properties = readdress(wanted.properties, identity, row.identity, body, was)
    message_id = labels(open_envelope("", "", False, len(body), properties).properties).message_id or b""
    return {name: getattr(row, name) for name in _KEPT} | {
        "identity": identity,
        "parent": row.identity,
        "framework_id": framework_id(body, read_dramatiq(body)),
        "body": body,
        "properties": properties,
        "digest": digest_of(body, message_id),
        "full_digest": digest_of(body, properties, to_bytes(row.exchange), to_bytes(row.routing_key)),
        # It has an id from its first moment on, and no broker has a copy of it that could come again.
        "had_id": True,
        "ack_proven": True,
        "status": Status.MANUAL,
        "fields": fields.read(body, properties),
    }


def editable(connection: Connection, row_id: int, *, lock: bool, force: bool) -> Any:
    row = None
    if 0 < row_id <= LARGEST_ID:
        query = select(MESSAGES).where(_M.scope_id == scope_of(connection), _M.id == row_id)
        row = connection.execute(query.with_for_update() if lock else query).one_or_none()
    if row is None:
        raise NoSuchMessage(row_id)
    if row.status == Status.PROCESSING:
        raise NotEditable(
            row_id,
            "a retry of it is under way and may be out already; edit it when it is no longer processing, or discard "
            "and restore it first",
        )
    if row.erased_at is not None:
        raise NotEditable(row_id, "it is erased: nothing is left of it")
    if row.status == Status.ARCHIVED:
        raise NotEditable(row_id, f"it is archived; `dlqbatch messages restore {row_id}` takes it out")
    if row.status == Status.RESOLVED and not force:
        raise NotEditable(
            row_id,
            "it is resolved: it was handled already, and what is sent in its place would be handled once more; "
            "--force edits it all the same",
        )
    if (name := holder(connection, row.plan_id)) is not None:
        raise NotEditable(
            row_id,
            f"replay plan {name} has reserved it and would skip it; edit it when the plan is done or aborted",
        )
    return row


LARGEST_BODY: Final = 128 * 1024 * 1024
"""The largest body in bytes; no RabbitMQ takes more unless it is configured to."""
_FRAME: Final = 131_072
_OVERHEAD: Final = 20
# Our own headers may take so many bytes when the message is sent; without room for it the history is left out.
_FOR_OURS: Final = 2_048
LARGEST_PROPERTIES: Final = _FRAME - _OVERHEAD - _FOR_OURS
_HEADERS: Final = 0x2000
_RESERVED: Final = b"x-death"


class EditRefused(DlqbatchError):
    """The edit makes no valid message; nothing was changed."""

    exit_code = 2

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(f"{why}. Nothing was changed.")


class HeaderEdits(NamedTuple):
    """Encoded texts by header name; None takes the header away."""

    wanted: Mapping[bytes, bytes | None] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(_shown(name) for name in self.wanted)


def header_edits(changed: Iterable[tuple[str, str]], removed: Iterable[str] = ()) -> HeaderEdits:
    """What somebody wrote, checked name by name."""
    wanted: dict[bytes, bytes | None] = {}
    for name, text in (*changed, *((name, None) for name in removed)):
        encoded = _checked(name)
        if encoded in wanted:
            raise EditRefused(f"the header '{_shown(encoded)}' is named twice; say once what it is to be")
        wanted[encoded] = None if text is None else _encoded(text)
    return HeaderEdits(wanted)


def edit_headers(properties: bytes, edits: HeaderEdits) -> bytes:
    """Flags and values with these headers changed; of several with one name the first takes the text."""
    if not edits.wanted:
        return properties
    try:
        cut = split(properties)
        present = {name for name, _ in fields(properties, cut.table_start, cut.table_end)}
        missing = {name for name, text in edits.wanted.items() if text is None} - present
        edited = _spliced(properties, edits.wanted)
        size = _size_without_ours(edited)
    except (UnreadableTable, IndexError, StructError):
        raise EditRefused("its headers cannot be read, so none can be changed; its body can") from None
    if missing:
        raise EditRefused(f"it has no header '{_shown(min(missing))}' that could be removed")
    if size > LARGEST_PROPERTIES and len(edited) > len(properties):
        raise EditRefused(
            f"its headers would take {size:,} bytes, and what is sent in one piece holds {LARGEST_PROPERTIES:,} of them"
        )
    return edited


def readdress(properties: bytes, identity: str, parent: str, body: bytes, was: str) -> bytes:
    """The properties for a new message: with an id of its own and its parent's, and without an attempt.

    `was` is the digest before the edit; a header with it gets the digest of the new body. Headers that cannot be read
    stay as they are.
    """
    ours: dict[bytes, bytes | None] = {
        names.ID: to_bytes(identity),
        names.PARENT: to_bytes(parent),
        names.ATTEMPT: None,
    }
    try:
        cut = split(properties)
        digest = names.scan(properties, cut.table_start, cut.table_end).ours.get(names.DIGEST)
        if digest is not None and digest.as_text() == was:
            ours[names.DIGEST] = to_bytes(header_digest(message_id_of(properties), len(body), [body]))
        return _spliced(properties, ours)
    except (UnreadableTable, IndexError, StructError):
        return properties


def check_body(before: bytes, after: bytes, properties: bytes, *, force: bool = False) -> None:
    """Refuse what no broker takes, and JSON that is JSON no more; `force` allows the second."""
    if len(after) > LARGEST_BODY:
        raise EditRefused(f"the body has {len(after):,} bytes, and a broker takes {LARGEST_BODY:,} at most")
    if force or not _should_be_json(before, properties):
        return
    try:
        json.loads(after.removeprefix(BOM_UTF8).decode(), parse_int=len, parse_float=len, parse_constant=_no_json)
    except RecursionError:
        raise EditRefused(
            "the body should be JSON, and is nested too deeply to tell; --force takes it as it is"
        ) from None
    except ValueError as error:
        raise EditRefused(f"the body should be JSON and is not: {error}; --force takes it as it is") from None


def _no_json(constant: str) -> NoReturn:
    """Python takes NaN and Infinity for numbers of JSON; hardly anything else does."""
    raise ValueError(f"{constant} is no number there")


def as_meant(before: bytes, edited: bytes) -> bytes:
    """The text that an editor left, without the line's end that many editors add to the last line by themselves."""
    if before.endswith(b"\n") or not edited.endswith(b"\n"):
        return edited
    return edited.removesuffix(b"\n").removesuffix(b"\r")


def _checked(name: str) -> bytes:
    encoded = _encoded(name)
    if not encoded or len(encoded) > LONGEST_NAME:
        raise EditRefused(f"a header's name has from 1 to {LONGEST_NAME} bytes, and this one has {len(encoded)}")
    if encoded.startswith(names.PREFIX):
        raise EditRefused(f"the header '{_shown(encoded)}' is dlqbatch's own: it says who the message is and was")
    if encoded in names.BROKERS or encoded.startswith(_RESERVED):
        raise EditRefused(f"the header '{_shown(encoded)}' is the broker's own, and never sent again")
    return encoded


def _encoded(text: str) -> bytes:
    try:
        return to_bytes(text)
    except UnicodeEncodeError:
        raise EditRefused("a header holds half of a character, which cannot be sent") from None


def _shown(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")


def _spliced(properties: bytes, wanted: Mapping[bytes, bytes | None]) -> bytes:
    cut = split(properties)
    left = dict(wanted)
    table = b""
    for name, field in fields(properties, cut.table_start, cut.table_end):
        if name not in wanted:
            table += encode_field(name, field)
            continue
        text = left.pop(name, None)
        if text is not None:
            is_same = field.tag in amqp_table.TEXT_TAGS and field.value == text
            table += encode_field(name, field if is_same else Field(amqp_table.LONG_STRING, text))
    for name, text in left.items():
        if text is not None:
            table += encode_field(name, Field(amqp_table.LONG_STRING, text))
    flags = (cut.flags | _HEADERS).to_bytes(2, "big")
    size = len(table).to_bytes(4, "big")
    return b"".join((flags, properties[2 : cut.head_end], size, table, properties[cut.table_end :]))


def _size_without_ours(properties: bytes) -> int:
    cut = split(properties)
    foreign = names.scan(properties, cut.table_start, cut.table_end).foreign
    return len(properties) - (cut.table_end - cut.table_start) + len(foreign)


def _should_be_json(body: bytes, properties: bytes) -> bool:
    if body_form(body) == "json":
        return True
    said = readable(properties).properties
    # What is compressed is no JSON as it stands.
    kind = str(said.get("content_type", "")).partition(";")[0].strip().lower()
    return "content_encoding" not in said and (kind == "application/json" or kind.endswith("+json"))
