"""One run of a job for an event of a cloud platform, such as AWS Lambda; it returns the report."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

from dlqbatch import jobs, logs
from dlqbatch.aws import secrets
from dlqbatch.aws.events import Ignored, understand
from dlqbatch.aws.metrics import print_metrics
from dlqbatch.errors import DlqbatchError, SettingsError
from dlqbatch.jobs import Report, count
from dlqbatch.settings import Settings, load, mask_secrets

_DIALECT: Final = "sqlalchemy.dialects.postgresql.psycopg"
# What a run of a job loads only when it first uses it.
_LOADED_LATE: Final = {
    "ingest": (_DIALECT,),
    "lifecycle": (_DIALECT,),
    "monitor": (_DIALECT, "dlqbatch.monitor.queue_depths", "dlqbatch.broker.session", "dlqbatch.topology.declare"),
    "replay": (_DIALECT,),
    "retain": (_DIALECT,),
}


def load_ahead(environ: Mapping[str, str]) -> None:
    """Load the job of this function, and what its first run would load besides; nothing is connected to."""
    job = environ.get("DLQBATCH_JOB") or "drain"
    for module in (f"dlqbatch.{job}.job", "dlqbatch.store.timeouts", *_LOADED_LATE.get(job, ())):
        import_module(module)
    for variable in ("DLQBATCH_SECRET", "DLQBATCH_DATABASE_SECRET"):
        if secret := environ.get(variable):
            secrets.prepare(secret)


def invoke(event: object, context: Any) -> dict[str, object]:
    # The settings set the logs up again. Until then, the platform's own handler would print passwords.
    logs.configure()
    request_id = getattr(context, "aws_request_id", None)
    logs.begin_request(request_id if isinstance(request_id, str) else None)
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
    if not isinstance(dry_run, bool):
        raise SettingsError("dry_run is not true or false")
    named = request.job or (load({}, overrides_from="event").job if options else "")
    known = jobs.options_of(named)
    unknown = sorted(set(map(str, options)) - set(known))
    if unknown and (named in jobs.JOBS or not request.job):
        raise SettingsError(
            f"the event has unknown options: {', '.join(unknown)}; a run of {named} understands: "
            f"{', '.join(('job', 'dry_run', *known))}"
        )

    def read() -> Settings:
        loaded = load(jobs.settings_of(named, options), overrides_from="event", secrets=secrets.fetch)
        mask_secrets(loaded)
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
