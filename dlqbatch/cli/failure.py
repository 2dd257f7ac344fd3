"""How a command ends when it cannot do what was asked."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import suppress
from typing import Final

from dlqbatch import logs
from dlqbatch.errors import DlqbatchError

PARTIAL: Final = 3
USAGE: Final = 2
UNEXPECTED: Final = 1


_doing: str | None = None
_RUNS: Final = frozenset({"drain", "ingest", "check", "lifecycle", "retain", "monitor", "replay"})
"""What ends with a report, also when it fails."""


def tell_job(job: str) -> None:
    """What this process does: the line that tells of its failure says so."""
    global _doing  # noqa: PLW0603  (a process runs one command, and its watchdog has to know which)
    _doing = job


def failed(error: DlqbatchError, *, as_json: bool) -> int:
    """Say it on stderr, and as JSON on stdout for a program; return the exit code."""
    say(type(error).__name__, str(error), error.exit_code, as_json=as_json)
    return error.exit_code


def unexpected(error: Exception, *, as_json: bool) -> int:
    """What nobody thought of: the trace goes to the log, where passwords are masked."""
    if not logging.root.handlers:
        logs.configure()
    logs.get(__name__).error("unexpected error", failure=error)
    text = f"an unexpected error, {type(error).__name__}: {error}. What was not settled is back in its queue."
    say(type(error).__name__, text, UNEXPECTED, as_json=as_json)
    return UNEXPECTED


def say(kind: str, text: str, code: int, *, as_json: bool) -> None:
    """On stderr in the form that the logs have: lines for a person, or one line of JSON."""
    text = logs.masked(text)
    if not logging.root.handlers:
        logs.configure(style=_stated_format())
    if logs.is_json():
        fields = {"job": _doing, "error": kind, "exit_code": code, "message": text}
        sys.stderr.write(logs.json_line("error", "failed", __name__, fields) + "\n")
    else:
        for line in text.splitlines():
            sys.stderr.write(f"dlqbatch: {logs.plain(line)}\n")
    if as_json:
        told: dict[str, object] = {"outcome": "failed", "error": {"type": kind, "message": text}}
        if _doing in _RUNS:
            # A run that ends in an error has taken nothing; of an error that nobody thought of that is not known.
            counts = {"got": 0} if code != UNEXPECTED else {}
            told = {"job": _doing, "outcome": "failed", "stopped_by": "failure", "counts": counts, **told}
        with suppress(OSError):  # it may be stdout that failed
            sys.stdout.write(json.dumps(told) + "\n")


def _stated_format() -> logs.Format:
    """For what goes wrong before the settings are read: a mistyped option, a package that is missing."""
    try:
        from dlqbatch.settings import stated_format
    except ImportError:
        return "auto"
    return stated_format()
