"""The pages of the machinery: runs, alerts, what doctor finds, the journal, and the settings."""

from __future__ import annotations

import time
from threading import Lock
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode

from starlette.responses import Response

from dlqbatch.doctor.findings import Severity
from dlqbatch.doctor.job import Diagnosis, diagnose
from dlqbatch.monitor import run_list
from dlqbatch.monitor.alerts import active, recent
from dlqbatch.settings import OPTIONS
from dlqbatch.settings.options import property_key
from dlqbatch.settings.reference import default_text
from dlqbatch.store.engine import reading
from dlqbatch.store.filters import NotUnderstood, parse_time

if TYPE_CHECKING:
    from dlqbatch.console.gate import Call

_PAGE: Final = 50
_DIAGNOSIS_HOLDS: Final = 20.0


def runs(call: Call) -> Response:
    job, after = call.one("job").strip() or None, call.one("after").strip()
    if after and not (after.isascii() and after.isdigit()):
        raise NotUnderstood("a page of runs goes on after a number")
    with reading(call.console.engine) as connection:
        found = run_list.recent(connection, job, _PAGE, int(after) if after else None)
        jobs = run_list.jobs(connection)
    more = urlencode({**({"job": job} if job else {}), "after": found[-1].id}) if len(found) == _PAGE else ""
    return call.page("runs.html", runs=found, jobs=jobs, job=job, more=more, is_first=not after)


def alerts(call: Call) -> Response:
    with reading(call.console.engine) as connection:
        return call.page("alerts.html", standing=active(connection), ended=recent(connection, _PAGE))


class Diagnoses:
    """Doctor looks at broker and database for some seconds: one look at a time, and its result is kept for a while."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._last: tuple[float, Diagnosis] | None = None

    def get(self, call: Call) -> Diagnosis:
        with self._lock:
            if self._last is None or time.monotonic() - self._last[0] > _DIAGNOSIS_HOLDS:
                self._last = (time.monotonic(), diagnose(call.console.settings))
            return self._last[1]


def doctor(call: Call) -> Response:
    found = call.console.diagnoses.get(call)
    return call.page("doctor.html", diagnosis=found, severities=list(Severity))


def journal(call: Call) -> Response:
    message, actor, since = (call.one(name).strip() for name in ("message", "actor", "since"))
    if message and not (message.isascii() and message.isdigit()):
        raise NotUnderstood(f"'{message}' is no number of a message")
    found = call.console.messages.journal(
        int(message) if message else None,
        actor=actor or None,
        since=parse_time(since) if since else None,
        limit=2 * _PAGE,
    )
    return call.page("journal.html", journal=found, message=message, actor=actor, since=since)


def settings(call: Call) -> Response:
    held = call.console.settings
    rows = []
    for option, info in OPTIONS.items():
        value = getattr(held, option)
        written = held.written_in.get(option, "")
        shown = default_text(option) if not written else _text(value)
        rows.append((property_key(option), shown, written or "default", str(info.description or "")))
    return call.page("settings.html", rows=rows, topologies=sorted(held.topologies), file=held.config_file)


def _text(value: object) -> str:
    """As it could be written; what is secret in it is masked by its own kind."""
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else "" if value is None else str(value)
