"""`dlqbatch drain`, `ingest`, `check`, `lifecycle`, `replay run`, `retain` and `monitor`: one run of a job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, NoReturn, TypeAlias

import typer

from dlqbatch.cli.options import (
    AsJson,
    ConfigFile,
    DryRun,
    MadeBy,
    Prometheus,
    SettingPairs,
    load_settings,
    overrides,
    this_user,
)
from dlqbatch.settings.sources import Spelled


def _bounds(
    *,
    max_messages: Annotated[
        int | None, typer.Option(help="Take at most so many messages; else as the setting says.")
    ] = None,
    max_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Stop taking after so many bytes of bodies, such as 64MiB.")
    ] = None,
    max_seconds: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Take messages for at most so many seconds.")
    ] = None,
) -> dict[str, object]:
    return {"max_messages": max_messages, "max_bytes": max_bytes, "max_seconds": max_seconds}


def _run(
    *, settings: SettingPairs = None, config: ConfigFile = None, dry_run: DryRun = False, as_json: AsJson = False
) -> Callable[[str, Mapping[str, object]], NoReturn]:
    def run(job: str, flags: Mapping[str, object]) -> NoReturn:
        from dlqbatch.cli.run import run_job

        raise typer.Exit(run_job(job, overrides(settings, flags), config=config, dry_run=dry_run, as_json=as_json))

    return run


Bounds: TypeAlias = Annotated[dict[str, object], MadeBy(_bounds)]
Run: TypeAlias = Annotated[Callable[[str, Mapping[str, object]], NoReturn], MadeBy(_run)]
"""Runs a job, with the settings of its own options, and ends the command with the exit code of the run."""


def _as_given(queues: list[str] | None) -> list[str] | None:
    """Names of queues from the command line, which may hold commas and blanks; None for those of the setting."""
    if queues is not None and not all(queue.strip() for queue in queues):
        raise typer.BadParameter("a queue's name is empty; leave it out to take the queues that the setting names")
    return queues or None


def drain(
    *,
    bounds: Bounds,
    allow_empty_policy: Annotated[
        bool,
        typer.Option(
            "--allow-empty-policy",
            help="Run although not a single event is configured: every failed message becomes a dead letter.",
        ),
    ] = False,
    run: Run,
) -> None:
    """Take what failed and decide by the policy: delay it, return it, or dead-letter it.

    dlqbatch drain --dry-run
    dlqbatch drain --max-messages 1000
    """
    run("drain", {**bounds, "allow_empty_policy": allow_empty_policy or None})


def ingest(
    queues: Annotated[
        list[str] | None,
        typer.Argument(help="Dead-letter queues, or wildcards such as 'dlq.*'; else as the setting says."),
    ] = None,
    *,
    head: Annotated[
        bool,
        typer.Option(
            "--head",
            help="Take only the first message of QUEUE, where your consumers are, and hold it: the poison that "
            "kills them. No consumer may be there.",
        ),
    ] = False,
    takes_any: Annotated[
        bool, typer.Option("--any", help="With --head: take it also if no replay or retry of dlqbatch has sent it.")
    ] = False,
    note: Annotated[
        str | None, typer.Option("--note", help="With --head: a note, for everybody who looks at the message's group.")
    ] = None,
    reason: Annotated[str | None, typer.Option("--reason", help="With --head: why; it goes into the journal.")] = None,
    actor: Annotated[
        str | None,
        typer.Option("--actor", metavar="NAME", help="With --head: who it was; else the user who runs this."),
    ] = None,
    bounds: Bounds,
    settings: SettingPairs = None,
    config: ConfigFile = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Take dead letters out of their queues into the dead store: committed first, then acknowledged.

    dlqbatch ingest
    dlqbatch ingest 'dlq.*' --dry-run
    dlqbatch ingest orders --head --note "kills the worker, INC-4711"
    """
    if not head:
        given = {"--any": takes_any, "--note": note, "--reason": reason, "--actor": actor}
        if named := next((option for option, value in given.items() if value), None):
            raise typer.BadParameter(f"{named} goes with --head", param_hint=named)
        run = _run(settings=settings, config=config, dry_run=dry_run, as_json=as_json)
        run("ingest", {**bounds, "ingest_queues": _as_given(queues)})
    if queues is None or len(queues) != 1 or any(value is not None for value in bounds.values()):
        raise typer.BadParameter(
            "it takes one message of one queue: name the queue, and no bounds", param_hint="--head"
        )
    from dlqbatch.cli.head import take

    code = take(
        load_settings(settings, config),
        queues[0],
        actor=this_user(actor),
        reason=reason or "it kills its consumers",
        note=note,
        takes_any=takes_any,
        dry_run=dry_run,
        as_json=as_json,
    )
    raise typer.Exit(code)


def check(
    queues: Annotated[
        list[str] | None, typer.Argument(help="Queues, or wildcards such as 'dlq.*'; else as the setting says.")
    ] = None,
    *,
    max_deaths: Annotated[
        int | None, typer.Option(help="Move what has failed more often than this; else as the setting says.")
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="QUEUE", help="Where to move it; 'dead.*' takes what the source's * stood for. Declared if missing."
        ),
    ] = None,
    bounds: Bounds,
    allow_delivery_cost: Annotated[
        bool,
        typer.Option(
            "--allow-delivery-cost",
            help="Look through quorum queues although it can cost the messages a delivery of their limit.",
        ),
    ] = False,
    run: Run,
) -> None:
    """Look at every message once: move what has failed too often to another queue, leave the rest in its place.

    dlqbatch check orders.dlq --max-deaths 5 --to dead.orders --dry-run
    """
    of_check = {"check_queues": _as_given(queues), "check_max_deaths": max_deaths, "check_target": to}
    run("check", {**bounds, **of_check, "allow_delivery_cost": allow_delivery_cost or None})


def lifecycle(*, bounds: Bounds, run: Run) -> None:
    """Send dead messages whose time has come again, and resolve those that stayed away.

    dlqbatch lifecycle --dry-run
    dlqbatch lifecycle
    """
    run("lifecycle", bounds)


def replay_released(
    *,
    max_seconds: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Send and wait for at most so many seconds.")
    ] = None,
    run: Run,
) -> None:
    """Go on with the plans that people have released, each for its share of the time; the next run does the same.

    dlqbatch replay run --dry-run
    dlqbatch replay run
    """
    run("replay", {"max_seconds": max_seconds})


def retain(
    *,
    max_messages: Annotated[
        int | None, typer.Option(help="Archive or delete at most so many messages; without it, all.")
    ] = None,
    max_seconds: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Begin nothing after so many seconds.")
    ] = None,
    run: Run,
) -> None:
    """Delete what was resolved long ago; move what failed long ago to cold storage, verified before anything goes.

    dlqbatch retain --dry-run
    dlqbatch retain --max-messages 10000
    """
    bounds: dict[str, object] = {
        Spelled("retain_max_messages", "--max-messages"): max_messages,
        Spelled("retain_max_seconds", "--max-seconds"): max_seconds,
    }
    run("retain", bounds)


def monitor(*, prometheus: Prometheus = None, run: Run) -> None:
    """Measure the dead store; fire and end alerts, and tell of them. It needs no broker.

    dlqbatch monitor
    dlqbatch monitor --prometheus /var/lib/node_exporter/dlqbatch.prom
    """
    run("monitor", {"prometheus_file": None if prometheus is None else str(prometheus)})
