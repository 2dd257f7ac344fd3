"""Edits as a person writes them on a command line or in a request: texts of values, a patch and headers."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Engine

from dlqbatch.amqp.fields import Fields
from dlqbatch.messages.edit import Edited, Editing, Original, header_edits
from dlqbatch.messages.edit_many import ManyEdited, edit_many, edits
from dlqbatch.messages.shown import Reveal
from dlqbatch.store.filters import Filters


def edit_written(
    engine: Engine,
    values: Sequence[str],
    patch: bytes | None,
    headers: Sequence[tuple[str, str]],
    removed: Sequence[str],
    row_ids: Sequence[int] = (),
    filters: Filters | None = None,
    *,
    fields: Fields,
    actor: str,
    reason: str,
    expect: int | None = None,
    force: bool = False,
    dry_run: bool = False,
    verified: bool = False,
) -> ManyEdited:
    """The same changes in many messages."""
    return edit_many(
        engine,
        edits(values, patch, header_edits(headers, removed)),
        row_ids,
        filters,
        actor=actor,
        reason=reason,
        expect=expect,
        force=force,
        dry_run=dry_run,
        verified=verified,
        fields=fields,
    )


def original(engine: Engine, row_id: int, by: Reveal, *, fields: Fields, force: bool = False) -> Original:
    """The body of one message, unmasked and so journalled."""
    return Editing(engine, fields).original(row_id, by, force=force)


def edit_one(
    engine: Engine,
    row_id: int,
    body: bytes | None,
    headers: Sequence[tuple[str, str]],
    removed: Sequence[str],
    *,
    fields: Fields,
    actor: str,
    reason: str,
    force: bool = False,
    dry_run: bool = False,
    verified: bool = False,
) -> Edited:
    """Another body or other headers in one message."""
    return Editing(engine, fields).edit(
        row_id,
        actor=actor,
        reason=reason,
        body=body,
        headers=header_edits(headers, removed),
        force=force,
        dry_run=dry_run,
        verified=verified,
    )
