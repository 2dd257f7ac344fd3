"""The commands, their options and their help."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Final

import typer

from dlqbatch import __version__
from dlqbatch.cli.failure import failed, say, tell_job
from dlqbatch.cli.help_pages import Contents
from dlqbatch.cli.options import Commands
from dlqbatch.errors import DlqbatchError

_JOBS: Final = ("drain", "ingest", "check", "lifecycle", "retain", "monitor")
PANELS: Final = {
    "Jobs, which a scheduler starts": (*_JOBS, "schedule"),
    "At night: what has failed, and what to do": ("status", "messages", "replay", "archive"),
    "Set-up": ("doctor", "topology", "db", "events", "rules"),
    "Other": ("demo",),
}
"""The commands in the order of the help."""
COMMANDS: Final = tuple(name for names in PANELS.values() for name in names)
_FAMILIES: Final = frozenset({"messages", "replay", "archive", "topology", "db", "events", "rules"})
"""Commands with commands of their own: the `app` of their module. Any other is the function of its name."""
_MODULES: Final = {"db": "database", **dict.fromkeys(_JOBS, "jobs")}
"""The module of each command whose module has another name."""


def application(first: str | None = None) -> typer.Typer:
    """The command line; if its first word is a command's name, with this command alone, so that no other is loaded.

    Any other word gets all of them: to list them, or to guess which one was meant.
    """
    is_known = first in COMMANDS
    app = Commands(
        name="dlqbatch",
        cls=Contents,
        no_args_is_help=True,
        add_completion=not is_known,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog=EPILOG,
    )
    app.callback()(about)
    for panel, names in PANELS.items():
        for name in (one for one in names if one == first or not is_known):
            module = import_module(f"dlqbatch.cli.{_MODULES.get(name, name)}")
            if name in _FAMILIES:
                app.add_typer(module.app, name=name, cls=Contents, rich_help_panel=panel)
            else:
                app.command(rich_help_panel=panel)(getattr(module, name))
    return app


EPILOG: Final = """\
Without a command: one run of the job that the settings name, which is drain.
`dlqbatch help COMMAND` is the same as `dlqbatch COMMAND --help`.
Exit codes: 0 done, 1 failed, 2 usage or configuration, 3 partial, 4 broker or database unreachable; docs/cli.md has \
them all."""


def _show_version(wanted: bool) -> None:
    if not wanted:
        return
    sys.stdout.write(f"dlqbatch {__version__}\n")
    raise typer.Exit


def about(
    *,
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """A scheduled batch processor for RabbitMQ dead letters and retries that loses nothing."""


def run_command(arguments: Sequence[str], *, names_job: bool = True) -> int:
    """Parse and run; usage errors end with 2, as every error of the configuration does.

    Without `names_job` the first argument is the settings' job, which nobody typed.
    """
    as_json = "--json" in arguments
    if arguments[:1] == ["help"]:
        arguments = [*(one for one in arguments if one != "help"), "--help"]
    if arguments and arguments[0] in COMMANDS:
        tell_job(arguments[0])
    try:
        app = application(arguments[0] if arguments else None)
        code: object = app(list(arguments), prog_name="dlqbatch", standalone_mode=False)
    except typer.TyperException as error:
        _say_misuse(error, as_json=as_json, names_job=names_job)
        return error.exit_code
    except DlqbatchError as error:
        return failed(error, as_json=as_json)
    return code if isinstance(code, int) else 0


def _say_misuse(error: typer.TyperException, *, as_json: bool, names_job: bool) -> None:
    text = error.format_message().strip()
    context: typer.Context | None = getattr(error, "ctx", None)
    # Without a text it is a group without a command, and its help has just been shown.
    if text:
        path = context.command_path if context is not None else ""
        hint = f"\n`{path if names_job else 'dlqbatch'} --help` shows what there is." if path else ""
        say("UsageError", text + hint, error.exit_code, as_json=as_json)
