"""How a command ends when it cannot do what was asked."""

from __future__ import annotations

import json
import logging
import sys
from typing import TYPE_CHECKING, Final

from dlqbatch import logs

if TYPE_CHECKING:
    from dlqbatch.errors import DlqbatchError

PARTIAL: Final = 3
USAGE: Final = 2
UNEXPECTED: Final = 1


def failed(error: DlqbatchError, *, as_json: bool) -> int:
    """Say it on stderr, and as JSON on stdout for a program; return the exit code."""
    say(type(error).__name__, str(error), as_json=as_json)
    return error.exit_code


def unexpected(error: Exception, *, as_json: bool) -> int:
    """What nobody thought of: the trace goes to the log, where passwords are masked."""
    if not logging.root.handlers:
        logs.configure()
    logs.get(__name__).error("unexpected error", failure=error)
    text = f"an unexpected error, {type(error).__name__}: {error}. What was not settled is back in its queue."
    say(type(error).__name__, text, as_json=as_json)
    return UNEXPECTED


def say(kind: str, text: str, *, as_json: bool) -> None:
    text = logs.masked(text)
    for line in text.splitlines():
        sys.stderr.write(f"dlqbatch: {logs.plain(line)}\n")
    if as_json:
        told = {"outcome": "failed", "error": {"type": kind, "message": text}}
        sys.stdout.write(json.dumps(told) + "\n")
