"""Every decision, refused ones too, as one JSON line on the logger `dlqbatch.console.audit`."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from dlqbatch.console.rights import Person
from dlqbatch.logs import masked, plain

LOGGER: Final = "dlqbatch.console.audit"
_LONGEST: Final = 500
_log: Final = logging.getLogger(LOGGER)


def note(
    what: str,
    outcome: str,
    person: Person | None,
    client: str,
    why: str = "",
    about: Mapping[str, object] | None = None,
) -> None:
    """Write one line: what was asked for, by whom, from where, and whether it was done, refused or failed.

    `about` names the messages, the plan or the rule; nothing of a message's content belongs there.
    """
    line = {
        "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "what": what,
        "outcome": outcome,
        "who": person and person.name,
        "role": person and person.role.word,
        "verified": person is not None and person.is_verified,
        "by": person and person.by,
        "from": client,
        "why": why,
        "about": {name: str(value) for name, value in (about or {}).items()},
    }
    _log.info("%s", json.dumps({name: _harmless(value) for name, value in line.items()}, ensure_ascii=False))


def _harmless(value: object) -> object:
    if isinstance(value, str):
        return plain(masked(value), _LONGEST)
    return {name: _harmless(each) for name, each in value.items()} if isinstance(value, dict) else value


def to_stderr() -> None:
    """Write the lines to stderr as they are, apart from the log of the program."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    _log.handlers[:] = [handler]
    _log.setLevel(logging.INFO)
    _log.propagate = False
