"""What people decide about a group: a hold, a note with its owner and tags, an acknowledgement; each is an action.

The same failure in another description is another group, about which the same is decided in the same action.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Connection, Engine, func, select

from dlqbatch.errors import DlqbatchError
from dlqbatch.ingest.same_failure import groups_alike
from dlqbatch.store import action_log, holds
from dlqbatch.store.access import StoreClock
from dlqbatch.store.action_log import Request, check_person
from dlqbatch.store.action_tables import GROUPS
from dlqbatch.store.engine import keeping, writing
from dlqbatch.store.filters import NotUnderstood, action_name
from dlqbatch.store.scopes import own
from dlqbatch.store.tables import MESSAGES
from dlqbatch.store.text import json_ready

_LONGEST: Final = 16
_HEX: Final = frozenset("0123456789abcdef")
_NAMED: Final = 4
_G: Final = GROUPS.c
_M: Final = MESSAGES.c
_ALSO: Final = "also"
_TIMES: Final = frozenset({"held_at", "acknowledged_at", "acknowledged_until"})


class NoSuchGroup(DlqbatchError):
    exit_code = 1

    def __init__(self, word: str) -> None:
        self.word = word
        super().__init__(f"no group begins with '{word}'; `dlqbatch groups list` shows them. Nothing was changed.")


class NotHeld(DlqbatchError):
    exit_code = 1

    def __init__(self, fingerprint: str, queue: str, others: Sequence[str]) -> None:
        self.fingerprint, self.queue = fingerprint, queue
        where = f" in '{queue}'" if queue else ""
        held = f"; it is held in {', '.join(repr(name) for name in others)}: name that with --queue" if others else ""
        super().__init__(f"group {fingerprint} is not on hold{where}{held}. Nothing was changed.")


class AlreadyHeld(DlqbatchError):
    """Somebody else holds the group: their reason would be lost."""

    exit_code = 1

    def __init__(self, fingerprint: str, by: str, at: datetime, why: str) -> None:
        self.fingerprint, self.by, self.at, self.why = fingerprint, by, at, why
        super().__init__(
            f"group {fingerprint} is on hold already, by {by} since {at:%Y-%m-%d %H:%M:%S} UTC: {why}. Nothing was "
            "changed."
        )


class WrittenSince(DlqbatchError):
    """Somebody has written another note or owner since this one was begun."""

    exit_code = 1

    def __init__(self, fingerprint: str, written: Mapping[str, str]) -> None:
        self.fingerprint, self.written = fingerprint, dict(written)
        found = ", ".join(f"{name} '{value}'" if value else f"no {name}" for name, value in written.items())
        super().__init__(f"somebody has written about group {fingerprint} since: {found}. Nothing was changed.")


@dataclass(frozen=True, slots=True)
class Decided:
    group: str
    queue: str
    """Empty: the failure in all queues."""
    action: str
    """What undoes it."""
    also: tuple[str, ...] = ()
    """The other groups of the same failure, as other programs describe it, about which the same was decided."""


def hold(
    engine: Engine,
    group: str,
    *,
    queue: str = "",
    actor: str,
    reason: str,
    now: datetime | None = None,
    verified: bool = False,
) -> Decided:
    """Nothing of the group is taken to be sent from this commit on, and no newcomer."""
    now = StoreClock(engine)() if now is None else now
    values = {"held_at": now, "held_by": actor, "held_why": reason, "reviving": False}
    return _decide(engine, "hold", group, queue, values, actor, reason, now, verified=verified)


def unhold(
    engine: Engine,
    group: str,
    *,
    queue: str = "",
    actor: str,
    reason: str,
    now: datetime | None = None,
    verified: bool = False,
) -> Decided:
    """Lift the hold; what came due meanwhile is due now. After a cut the lifecycle finishes this."""
    now = StoreClock(engine)() if now is None else now
    values = {"held_at": None, "held_by": None, "held_why": None, "reviving": True}
    decided = _decide(engine, "unhold", group, queue, values, actor, reason, now, verified=verified)
    revive_all(engine, (decided.group, *decided.also), decided.queue, now)
    return decided


def revive_all(engine: Engine, fingerprints: Iterable[str], queue: str, now: datetime) -> None:
    with keeping(engine) as kept:
        for fingerprint in fingerprints:
            last: int | None = 0
            while last is not None:
                with writing(kept) as connection:
                    last = holds.revive(connection, fingerprint, queue, now, last)


def note(
    engine: Engine,
    group: str,
    *,
    queue: str = "",
    text: str | None = None,
    owner: str | None = None,
    tags: Sequence[str] | None = None,
    seen: Mapping[str, str] | None = None,
    actor: str,
    now: datetime | None = None,
    verified: bool = False,
) -> Decided:
    """Write a note, an owner or tags; what is None stays, and an empty one is taken away.

    WrittenSince if note and owner are not what the person has `seen`.
    """
    given = {"note": text, "owner": owner, "tags": None if tags is None else [tag for tag in tags if tag]}
    values = {name: value or (None if name != "tags" else []) for name, value in given.items() if value is not None}
    if not values:
        raise NotUnderstood(
            "give a note, --owner or --tag; an empty one takes away what is there. Nothing was changed."
        )
    now = StoreClock(engine)() if now is None else now
    return _decide(engine, "note", group, queue, values, actor, text or "noted", now, verified=verified, seen=seen)


def acknowledge(
    engine: Engine,
    group: str,
    *,
    queue: str = "",
    until: datetime | None = None,
    more: int | None = None,
    actor: str,
    reason: str,
    now: datetime | None = None,
    verified: bool = False,
) -> Decided:
    """Somebody knows of it: it is acknowledged until a time, until so many more have come, or until it grows."""
    now = StoreClock(engine)() if now is None else now
    if until is not None and until <= now:
        raise NotUnderstood(f"--until {until:%Y-%m-%d %H:%M:%S} UTC is over already. Nothing was changed.")
    values = {
        "acknowledged_at": now,
        "acknowledged_by": actor,
        "acknowledged_until": until,
        "acknowledged_more": more,
    }
    return _decide(engine, "ack", group, queue, values, actor, reason, now, verified=verified)


def _decide(
    engine: Engine,
    kind: str,
    group: str,
    queue: str,
    values: Mapping[str, Any],
    actor: str,
    reason: str,
    now: datetime,
    *,
    verified: bool,
    seen: Mapping[str, str] | None = None,
) -> Decided:
    check_person(actor, reason)
    with writing(engine) as connection:
        fingerprint = the_group(connection, group)
        present = holds.decided(connection, fingerprint, queue)
        written = {name: present.get(name) or "" for name in seen or ()}
        if written != (seen or {}):
            raise WrittenSince(fingerprint, written)
        if kind == "hold" and present.get("held_at") is not None and present["held_by"] != actor:
            raise AlreadyHeld(fingerprint, present["held_by"], present["held_at"], present["held_why"])
        if kind == "unhold" and present.get("held_at") is None:
            others = select(_G.queue).where(
                own(connection, _G.scope_id), _G.fingerprint == fingerprint, _G.held_at.is_not(None)
            )
            raise NotHeld(fingerprint, queue, connection.scalars(others).all())
        # Only what the same hold holds is lifted: another one was put there by somebody for a reason.
        also = (
            holds.decided_together(connection, fingerprint, queue, ("held_at", "held_by", "held_why"))
            if kind == "unhold"
            else holds.decided_alike(connection, fingerprint, groups_alike(connection, fingerprint, queue), queue)
        )
        details = holds.decide(connection, fingerprint, queue, values, now)
        if also:
            details[_ALSO] = [holds.decide(connection, each, queue, values, now) for each in also]
        request = Request(kind, actor, reason, verified, details=details)
        action_id = action_log.begin(connection, request, now, ended=True)
    return Decided(fingerprint, queue, action_name(action_id), tuple(also))


def put_back(connection: Connection, details: Mapping[str, Any], now: datetime) -> str:
    """Write what the groups had before an action; if that is not the newest decision, say so and write nothing.

    What arrived since in another description, and took the decision over, has before it what the group had.
    """
    parts = [details, *details.get(_ALSO, ())]
    for each in parts:
        present = holds.decided(connection, each["group"], each["queue"])
        after = {name: value for name, value in each["after"].items() if name != "reviving"}
        if {name: json_ready(present.get(name)) for name in after} != after:
            return f"somebody has decided something else about group {each['group']} since"
    newcomers = holds.decided_together(connection, details["group"], details["queue"], details["after"])
    named = {each["group"] for each in parts}
    for each in [*parts, *({**details, "group": group} for group in newcomers if group not in named)]:
        _write(connection, each, now)
    return ""


def _write(connection: Connection, details: Mapping[str, Any], now: datetime) -> None:
    present = holds.decided(connection, details["group"], details["queue"])
    before = dict(details["before"])
    for name in _TIMES & before.keys():
        before[name] = None if before[name] is None else datetime.fromisoformat(before[name])
    if "held_at" in before:
        before["reviving"] = before["held_at"] is None
    before["tags"] = before.get("tags") or [] if "tags" in before else present.get("tags", [])
    holds.decide(connection, details["group"], details["queue"], before, now)


def reverse(details: Mapping[str, Any]) -> dict[str, Any]:
    """The details of the undo of a decision."""
    changed = {**details, "before": details["after"], "after": details["before"]}
    return changed | ({_ALSO: [reverse(each) for each in details[_ALSO]]} if details.get(_ALSO) else {})


def groups_of(connection: Connection, details: Mapping[str, Any]) -> list[str]:
    """The groups that a decision, which has just been written, was about."""
    together = holds.decided_together(connection, details["group"], details["queue"], details["after"])
    return list(dict.fromkeys([details["group"], *(each["group"] for each in details.get(_ALSO, ())), *together]))


def the_group(connection: Connection, word: str) -> str:
    """The fingerprint that begins with this word."""
    prefix = word.strip().lower()
    if not prefix or len(prefix) > _LONGEST or not set(prefix) <= _HEX:
        raise NoSuchGroup(word)
    found: list[str] = []
    last = prefix.ljust(_LONGEST, "f")
    condition = _M.fingerprint >= prefix.ljust(_LONGEST, "0")
    while len(found) < _NAMED:
        nearest = connection.scalar(
            select(func.min(_M.fingerprint)).where(own(connection), condition, _M.fingerprint <= last)
        )
        if nearest is None:
            break
        found.append(nearest)
        condition = _M.fingerprint > nearest
    if not found:
        raise NoSuchGroup(word)
    if len(found) > 1:
        some = ", ".join(found[: _NAMED - 1]) + (", …" if len(found) == _NAMED else "")
        raise NotUnderstood(f"'{word}' means several groups: {some}. Write more of it. Nothing was changed.")
    return found[0]
