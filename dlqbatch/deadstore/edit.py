"""Edit a dead message: a new row takes its place, and the original is archived in the same transaction."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import select

from dlqbatch.deadstore import states
from dlqbatch.deadstore.asking import LARGEST_ID
from dlqbatch.deadstore.clock import StoreClock
from dlqbatch.deadstore.edits import EDIT_OF, EDITED
from dlqbatch.deadstore.engine import reading, writing
from dlqbatch.deadstore.reservation import holder
from dlqbatch.deadstore.review import NoSuchMessage, carry_out, check_person
from dlqbatch.deadstore.tables import MESSAGES
from dlqbatch.errors import DlqbatchError
from dlqbatch.message.editing import HeaderEdits, as_meant, check_body, edit_headers, header_edits, readdress
from dlqbatch.message.envelope import open_envelope
from dlqbatch.message.properties import labels
from dlqbatch.message.readable import BodyForm, body_form
from dlqbatch.message.table import to_bytes
from dlqbatch.policy.examine import digest_of
from dlqbatch.policy.lifecycle import Status, path_of_discard

if TYPE_CHECKING:
    from datetime import datetime

    from sqlalchemy import Connection, Engine

_M: Final = MESSAGES.c
_KEPT: Final = (
    "source_queue",
    "exchange",
    "routing_key",
    "message_id",
    "origin_queue",
    "origin_exchange",
    "origin_key",
    "event",
    "reason",
    "error_type",
    "error_message",
    "error_stack",
    "fingerprint",
    "retry_count",
    "first_failed_at",
    "last_failed_at",
    "priority",
    "tags",
    "source",
    "system_state",
    "possible_duplicate",
)
"""What the new row has in common with the original; its attempts and its life in the store are its own."""


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
    """Of the original, which is archived now."""
    id: int | None
    """The new row, in manual; None on a dry run."""
    identity: str | None
    parent: str
    """The original's identity."""
    changed: tuple[str, ...]
    """`body`, and `header NAME`."""
    dry_run: bool


class Editing:
    as_meant = staticmethod(as_meant)
    header_edits = staticmethod(header_edits)

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def original(self, row_id: int, *, force: bool = False) -> Original:
        """What there is to edit; NotEditable before anybody takes the trouble."""
        with reading(self._engine) as connection:
            body: bytes = _editable(connection, row_id, lock=False, force=force).body
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
    ) -> Edited:
        """The new row is in manual: nothing goes out before a person replays it.

        Without a time it is the store's. Without a body that stays; `force` takes one that should be JSON and is not,
        and a message that is resolved.
        """
        check_person(actor, reason)
        headers = HeaderEdits() if headers is None else headers
        now = StoreClock(self._engine)() if now is None else now
        with (reading if dry_run else writing)(self._engine) as connection:
            row = _editable(connection, row_id, lock=not dry_run, force=force)
            properties = edit_headers(row.properties, headers)
            changed = tuple(f"header {name}" for name in headers.told) if properties != row.properties else ()
            if body is not None and body != row.body:
                check_body(row.body, body, row.properties, force=force)
                changed = ("body", *changed)
            if not changed:
                raise NothingEdited(row_id)
            done = Edited(row_id, row.status, None, None, row.identity, changed, dry_run)
            return done if dry_run else _carry_out(connection, row, done, body, properties, now, actor, reason)


def _carry_out(
    connection: Connection,
    row: Any,
    planned: Edited,
    body: bytes | None,
    properties: bytes,
    now: datetime,
    actor: str,
    reason: str,
) -> Edited:
    """The new row first: the original's journal names it."""
    identity = secrets.token_hex(16)
    properties = readdress(properties, identity, row.identity)
    body = row.body if body is None else body
    message_id = labels(open_envelope("", "", False, len(body), properties).properties).message_id or b""
    new = {name: getattr(row, name) for name in _KEPT} | {
        "identity": identity,
        "parent": row.identity,
        "body": body,
        "properties": properties,
        "digest": digest_of(body, message_id),
        "full_digest": digest_of(body, properties, to_bytes(row.exchange), to_bytes(row.routing_key)),
        # It has an id from its first moment on, and no broker has a copy of it that could come again.
        "had_id": True,
        "ack_proven": True,
        "status": Status.MANUAL,
    }
    what = ", ".join(planned.changed)
    ids = states.arrive(connection, [new], now, actor, f"{EDIT_OF}{row.id} ({what}): {reason}")
    new_id = ids[identity]
    why = f"{EDITED}{new_id} takes its place: {reason}"
    carry_out(connection, row.id, path_of_discard(row.status), now, actor, why)
    return Edited(row.id, row.status, new_id, identity, row.identity, planned.changed, dry_run=False)


def _editable(connection: Connection, row_id: int, *, lock: bool, force: bool) -> Any:
    row = None
    if 0 < row_id <= LARGEST_ID:
        asked = select(MESSAGES).where(_M.id == row_id)
        row = connection.execute(asked.with_for_update() if lock else asked).one_or_none()
    if row is None:
        raise NoSuchMessage(row_id)
    if row.status == Status.PROCESSING:
        raise NotEditable(
            row_id,
            "a retry of it is under way and may be out already; edit it when it is no longer processing, or discard "
            "and restore it first",
        )
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
