"""The API of messages beyond their list: groups and searches of them, what a filter has missed, and edits."""

from __future__ import annotations

from base64 import b64decode, b64encode
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from dlqbatch.amqp.fields import Fields
from dlqbatch.console.api import Answer, chosen, limit_of, noted, ready, text
from dlqbatch.console.schema import checked
from dlqbatch.messages.edit_written import edit_one as edit_message
from dlqbatch.messages.edit_written import edit_written
from dlqbatch.messages.edit_written import original as original_of
from dlqbatch.messages.search import fields_with, search_bodies
from dlqbatch.messages.shown import Reveal
from dlqbatch.store.filters import Filters, NotUnderstood

if TYPE_CHECKING:
    from dlqbatch.console.gate import Call

_LONGEST_SEARCH: Final = 60.0


def groups(call: Call) -> Answer:
    return ready(call.console.messages.groups(call.filters(), limit_of(call)))


def near(call: Call) -> Answer:
    """Why nothing matches a filter."""
    return {"near": call.console.messages.near(call.filters())}


def missing(call: Call) -> Answer:
    """What a filter names that no message has."""
    return {"missing": call.console.messages.values_not_found(call.filters())}


def fields(call: Call) -> Answer:
    """The fields that have this value."""
    return {"fields": fields_with(call.console.engine, _sought(call))}


def search(call: Call) -> Answer:
    """Look for a text in bodies and headers, for some seconds."""
    try:
        seconds = float(call.one("max-seconds", "30"))
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _LONGEST_SEARCH:
        raise NotUnderstood(f"max-seconds is a number from 0 to {_LONGEST_SEARCH:g}")
    return ready(
        search_bodies(
            call.console.engine,
            _sought(call),
            call.filters(),
            limit=limit_of(call),
            after=call.one("after") or None,
            seconds=seconds,
        )
    )


def _sought(call: Call) -> str:
    (sought,) = Filters.parse(text=call.one("sought")).texts
    return sought


def edit(call: Call) -> Answer:
    asked = checked(call.content, call.route.takes)
    filters, row_ids = chosen(asked)
    patch = asked.get("merge_patch")
    done = edit_written(
        call.console.engine,
        asked.get("set") or (),
        None if patch is None else patch.encode("utf-8", "surrogatepass"),
        _headers(asked),
        asked.get("remove_headers") or (),
        row_ids,
        None if row_ids else filters,
        actor=call.actor,
        reason=text(asked, "reason"),
        expect=asked.get("expect"),
        force=bool(asked.get("force")),
        dry_run=bool(asked.get("dry_run")),
        verified=call.is_verified,
        fields=Fields(call.console.settings.fields),
    )
    return noted(call, done)


def original(call: Call) -> Answer:
    """The body of a message that is to be edited, unmasked."""
    asked = checked(call.content, call.route.takes)
    by = Reveal(call.actor, text(asked, "reason"))
    held = Fields(call.console.settings.fields)
    found = original_of(call.console.engine, call.number("id"), by, fields=held, force=bool(asked.get("force")))
    call.note("done", message=call.path("id"))
    return {"body_base64": b64encode(found.body).decode(), "form": found.form}


def edit_one(call: Call) -> Answer:
    asked = checked(call.content, call.route.takes)
    body = asked.get("body_base64")
    try:
        body = None if body is None else b64decode(body, validate=True)
    except ValueError:
        raise NotUnderstood("body_base64 is no base64. Nothing was changed.") from None
    done = edit_message(
        call.console.engine,
        call.number("id"),
        body,
        _headers(asked),
        asked.get("remove_headers") or (),
        fields=Fields(call.console.settings.fields),
        actor=call.actor,
        reason=text(asked, "reason"),
        force=bool(asked.get("force")),
        dry_run=bool(asked.get("dry_run")),
        verified=call.is_verified,
    )
    if not done.dry_run:
        call.note("done", message=call.path("id"), action=done.action)
        call.console.snapshots.forget()
    return asdict(done)


def _headers(asked: Answer) -> list[tuple[str, str]]:
    found = asked.get("set_headers") or {}
    assert isinstance(found, dict)  # noqa: S101  (the schema says so)
    return list(found.items())
