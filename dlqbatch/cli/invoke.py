"""One invocation by a cloud platform: an event in, a report out."""

from __future__ import annotations

from typing import Any

from dlqbatch import logs, wiring
from dlqbatch.errors import DlqbatchError, SettingsError
from dlqbatch.runs.report import Report, count
from dlqbatch.settings import load


def invoke(event: object, context: Any) -> dict[str, object]:
    request = wiring.understand(event)
    if isinstance(request, wiring.Ignored):
        settings = load()
        logs.configure(settings.log_level, settings.log_format)
        report = Report(settings.job, "ok", "empty", count({}, 0)[0], warnings=(request.why,))
        logs.get(__name__).info("nothing to do", why=request.why)
        return report.as_dict()
    options = dict(request.options)
    dry_run = options.pop("dry_run", False)
    unknown = sorted(set(map(str, options)) - set(wiring.RUN_OPTIONS))
    if unknown or not isinstance(dry_run, bool):
        wrong = f"the event has unknown options: {', '.join(unknown)}" if unknown else "dry_run is not true or false"
        raise SettingsError(logs.plain(f"{wrong}; a run understands: job, dry_run, {', '.join(wiring.RUN_OPTIONS)}"))
    settings = load(options, given_by="event")
    logs.configure(settings.log_level, settings.log_format)
    occasion = wiring.Occasion(dry_run=dry_run, seconds_left=_seconds_left(context))
    report = wiring.run(request.job or settings.job, settings, occasion)
    if report.outcome == "failed":
        raise DlqbatchError(f"the run failed: {report.as_dict()}")
    return report.as_dict()


def _seconds_left(context: Any) -> float | None:
    remaining = getattr(context, "get_remaining_time_in_millis", None)
    return remaining() / 1000 if callable(remaining) else None
