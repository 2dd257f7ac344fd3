"""The commands, their options and their help."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Annotated, Final

import typer

from dlqbatch.cli.choices import AsJson, Config, DryRun, MaxBytes, MaxMessages, MaxSeconds, Settings, list_of, overrides
from dlqbatch.cli.failure import failed, say, tell_job
from dlqbatch.cli.job import run_job
from dlqbatch.errors import DlqbatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

COMMANDS: Final = ("drain", "ingest", "check", "lifecycle", "retain", "monitor", "status", "doctor", "schedule", "demo")
"""Each is the function of this name in the module of this name, or it is in this one."""
FAMILIES: Final = {
    "replay": "replay",
    "messages": "messages",
    "rules": "rules",
    "archive": "archive",
    "events": "events",
    "db": "database",
    "topology": "topology",
}
"""Commands with commands of their own, and the module whose `app` they are."""


def application(first: str | None = None) -> typer.Typer:
    """The command line; if its first word is a command's name, with this command alone, so that no other is loaded.

    Any other word gets all of them: to list them, or to guess which one was meant.
    """
    app = typer.Typer(
        name="dlqbatch",
        no_args_is_help=True,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog="Without a command: one run of the job that the settings name, which is drain. "
        "Exit codes: 0 done, 1 failed, 2 usage or configuration, 3 partial, 4 broker or database unreachable, "
        "130 interrupted, 141 nobody read the output to its end.",
    )
    app.callback()(about)
    is_known = first in COMMANDS or first in FAMILIES
    own: dict[str, Callable[..., None]] = {"drain": drain, "ingest": ingest, "demo": demo}
    for name in COMMANDS:
        if name == first or not is_known:
            app.command()(own.get(name) or getattr(import_module(f"dlqbatch.cli.{name}"), name))
    for name, module in FAMILIES.items():
        if name == first or not is_known:
            app.add_typer(import_module(f"dlqbatch.cli.{module}").app, name=name)
    return app


def _show_version(wanted: bool) -> None:
    if not wanted:
        return
    try:
        number = version("dlqbatch")
    except PackageNotFoundError:
        number = "(not installed, run from its folder)"
    sys.stdout.write(f"dlqbatch {number}\n")
    raise typer.Exit


def about(
    *,
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """A scheduled batch processor for RabbitMQ dead letters and retries that loses nothing."""


def drain(
    settings: Settings = None,
    config: Config = None,
    *,
    max_messages: MaxMessages = None,
    max_bytes: MaxBytes = None,
    max_seconds: MaxSeconds = None,
    allow_empty_policy: Annotated[
        bool,
        typer.Option(
            "--allow-empty-policy",
            help="Run although not a single event is configured: every failed message becomes a dead letter.",
        ),
    ] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Take what failed and decide by the policy: delay it, return it, or dead-letter it."""
    given = {"max_messages": max_messages, "max_bytes": max_bytes, "max_seconds": max_seconds}
    given["allow_empty_policy"] = allow_empty_policy or None
    raise typer.Exit(run_job("drain", overrides(settings, given), config=config, dry_run=dry_run, as_json=as_json))


def ingest(
    queues: Annotated[
        list[str] | None,
        typer.Argument(help="Dead-letter queues, or wildcards such as 'dlq.*'; else as the setting says."),
    ] = None,
    settings: Settings = None,
    config: Config = None,
    *,
    max_messages: MaxMessages = None,
    max_bytes: MaxBytes = None,
    max_seconds: MaxSeconds = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Take dead letters out of their queues into the dead store: committed first, then acknowledged."""
    given = {"max_messages": max_messages, "max_bytes": max_bytes, "max_seconds": max_seconds}
    given["ingest_queues"] = list_of(queues)
    raise typer.Exit(run_job("ingest", overrides(settings, given), config=config, dry_run=dry_run, as_json=as_json))


def demo(
    settings: Settings = None,
    *,
    real_time: Annotated[
        bool, typer.Option("--real-time", help="Wait 10, 15 and 20 seconds in the tiers, not fractions of them.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Watch three messages on a real broker: one passes, one fails for good, one passes at the second try."""
    from dlqbatch.cli.demo import run_demo  # noqa: PLC0415  (pulls in Rich's live display)

    raise typer.Exit(run_demo(overrides(settings), real_time=real_time, as_json=as_json))


def run_command(arguments: Sequence[str]) -> int:
    """Parse and run; usage errors end with 2, as every error of the configuration does."""
    as_json = "--json" in arguments
    if arguments and (arguments[0] in COMMANDS or arguments[0] in FAMILIES):
        tell_job(arguments[0])
    try:
        app = application(arguments[0] if arguments else None)
        code: object = app(list(arguments), prog_name="dlqbatch", standalone_mode=False)
    except typer.TyperException as error:
        _say_misuse(error, as_json=as_json)
        return error.exit_code
    except DlqbatchError as error:
        return failed(error, as_json=as_json)
    return code if isinstance(code, int) else 0


def _say_misuse(error: typer.TyperException, *, as_json: bool) -> None:
    text = error.format_message().strip()
    context: typer.Context | None = getattr(error, "ctx", None)
    # Without a text it is a group without a command, and its help has just been shown.
    if text:
        hint = f"\n`{context.command_path} --help` shows what there is." if context is not None else ""
        say("UsageError", text + hint, error.exit_code, as_json=as_json)
