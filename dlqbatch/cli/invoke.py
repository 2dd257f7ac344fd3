"""One run of a job for an event of a cloud platform, such as AWS Lambda; it returns the report."""

from __future__ import annotations

from typing import Any

from dlqbatch import jobs, logs
from dlqbatch.aws.events import Ignored, understand
from dlqbatch.aws.metrics import print_metrics
from dlqbatch.aws.secrets import fetch
from dlqbatch.errors import DlqbatchError, SettingsError
from dlqbatch.jobs import Report, count
from dlqbatch.settings import Settings, load, secrets_of


def invoke(event: object, context: Any) -> dict[str, object]:
    # The settings set the logs up again. Until then, the platform's own handler would print passwords.
    logs.configure()
    try:
        return _run(event, context)
    except DlqbatchError as error:
        # The platform prints an error and its cause unchanged, so that passwords have to be masked before.
        error.args = (_masked(str(error)),)
        raise error from None
    except Exception as error:  # noqa: BLE001  (the platform would print it with passwords)
        logs.get(__name__).error("unexpected error", failure=error)
        text = _masked(f"an unexpected error, {type(error).__name__}: {error}")
        raise DlqbatchError(f"{text}. What was not settled is back in its queue.") from None


def _masked(text: str) -> str:
    return "\n".join(map(logs.plain, logs.masked(text).splitlines()))


def _run(event: object, context: Any) -> dict[str, object]:
    request = understand(event)
    if isinstance(request, Ignored):
        settings = load()
        logs.configure(settings.log_level, settings.log_format)
        logs.get(__name__).info("nothing to do", why=request.why)
        return Report(settings.job, "ok", "empty", count({}, 0)[0], warnings=(request.why,)).as_dict()
    options = dict(request.options)
    dry_run = options.pop("dry_run", False)
    unknown = sorted(set(map(str, options)) - set(jobs.RUN_OPTIONS))
    if unknown or not isinstance(dry_run, bool):
        wrong = f"the event has unknown options: {', '.join(unknown)}" if unknown else "dry_run is not true or false"
        raise SettingsError(f"{wrong}; a run understands: job, dry_run, {', '.join(jobs.RUN_OPTIONS)}")

    named = request.job or (load({}, overrides_from="event").job if options else "")

    def read() -> Settings:
        loaded = load(jobs.settings_of(named, options), overrides_from="event", secrets=fetch)
        logs.hide(secrets_of(loaded))
        return loaded

    settings = read()
    logs.configure(settings.log_level, settings.log_format)
    run_options = jobs.RunOptions(dry_run=dry_run, seconds_left=_seconds_left(context))
    job = settings.job if request.job is None else request.job
    report: dict[str, object] = {"outcome": "failed"}  # all that the metrics know about a run that raises
    try:
        report = jobs.run(job, settings, run_options, read_again=read).as_dict()
    finally:
        if settings.metrics_namespace is not None and job in jobs.JOBS and not dry_run:
            print_metrics(settings.metrics_namespace, job, report)
    if report["outcome"] == "failed":
        raise DlqbatchError(f"the run failed: {report}")
    return report


def _seconds_left(context: Any) -> float | None:
    remaining = getattr(context, "get_remaining_time_in_millis", None)
    return remaining() / 1000 if callable(remaining) else None
