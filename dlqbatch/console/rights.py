"""Who may do what in the console: roles, the lists that give them, and whether a request may change anything."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final
from urllib.parse import urlsplit


class Role(IntEnum):
    """What somebody may do; each role may do what those below it may."""

    READER = 1
    """Look at everything, masked."""
    OPERATOR = 2
    """Decide about messages: plans, discards, edits, holds."""
    ADMIN = 3
    """Change events and rules too."""

    @property
    def word(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Person:
    name: str
    role: Role
    may_reveal: bool
    """Masked content may be shown to this person."""
    is_verified: bool
    """An OIDC provider, a trusted proxy or a token says who it is."""
    by: str
    """How that is known: `this machine`, `oidc`, `proxy` or `token`."""


@dataclass(frozen=True, slots=True)
class Members:
    """The people and groups of each right, as the settings list them."""

    readers: Sequence[str] = ()
    operators: Sequence[str] = ()
    admins: Sequence[str] = ()
    revealers: Sequence[str] = ()

    def person(self, name: str, groups: Collection[str], by: str) -> Person | None:
        """The highest role that the name or a group has; None if they have none."""
        names = {name, *groups}
        lists = {Role.ADMIN: self.admins, Role.OPERATOR: self.operators, Role.READER: self.readers}
        role = next((role for role, members in lists.items() if _is_in(names, members)), None)
        return None if role is None else Person(name, role, _is_in(names, self.revealers), is_verified=True, by=by)


def _is_in(names: Collection[str], members: Collection[str]) -> bool:
    return any(member == "*" or member in names for member in members)


_SAFE: Final = frozenset({"GET", "HEAD"})


def is_forged(method: str, *, site: str | None, origin: str | None, hosts: Collection[str], ambient: bool) -> bool:
    """Whether a request that would change something may come from another page than ours.

    `site` is the header Sec-Fetch-Site, which browsers set and no page can; `origin` is the header Origin, for those
    that do not. `ambient` says that the browser adds the login by itself, as it does with a cookie; a token that the
    caller has put into the request itself cannot be forged.
    """
    if method in _SAFE or not ambient:
        return False
    if site is not None:
        return site != "same-origin"
    return origin is None or urlsplit(origin).netloc.lower() not in hosts


def refusal(person: Person | None, needs: Role | None, *, reveals: bool = False) -> str:
    """Why this person may not do this; empty if it is allowed."""
    if needs is None:
        return ""
    if person is None:
        return "log in first"
    if person.role < needs:
        return f"this takes the role {needs.word}, and {person.name} has the role {person.role.word}"
    if reveals and not person.may_reveal:
        return f"{person.name} may not see masked content; that is a right of its own"
    return ""
