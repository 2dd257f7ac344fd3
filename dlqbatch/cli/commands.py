"""The tree of the commands: which there are, and how one is parsed and run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Final

import typer

from dlqbatch import __version__
from dlqbatch.cli.help_pages import Contents
from dlqbatch.cli.options import Commands
from dlqbatch.cli.printing import name_job, print_error, print_failure
from dlqbatch.errors import DlqbatchError

_JOBS: Final = ("drain", "ingest", "check", "lifecycle", "retain", "monitor")
PANELS: Final = {
    "Jobs, which a scheduler starts": (*_JOBS, "schedule"),
    "At night: what has failed, and what to do": (
        *("status", "console", "groups", "messages", "peek", "replay", "actions", "undo", "archive"),
    ),
    "Set-up": ("doctor", "upgrade-check", "topology", "db", "events", "rules"),
    "Other": ("demo",),
}
"""The commands in the order of the help page."""
COMMANDS: Final = tuple(name for names in PANELS.values() for name in names)
_GROUPS: Final = frozenset({"groups", "messages", "replay", "actions", "archive", "topology", "db", "events", "rules"})
"""The groups of commands, each the `app` of its module. Any other command is the function of its name."""
_MODULES: Final = {
    "db": "database",
    "undo": "actions",
    "upgrade-check": "upgrade_check",
    **dict.fromkeys(_JOBS, "jobs"),
}
"""The modules that have another name than their command."""


def application(first: str | None = None) -> typer.Typer:
    """The parser of the command line. If the first word is a command, the modules of the others are not loaded.

    After any other word all commands are there: for the help page, or to guess which one was meant.
    """
    is_known = first in COMMANDS
    app = Commands(
        name="dlqbatch",
        cls=Contents,
        add_completion=not is_known,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog=EPILOG,
    )
    app.callback()(about)
    for panel, names in PANELS.items():
        for name in (each for each in names if each == first or not is_known):
            module = import_module(f"dlqbatch.cli.{_MODULES.get(name, name)}")
            if name in _GROUPS:
                app.add_typer(module.app, name=name, cls=Contents, rich_help_panel=panel)
            else:
                app.command(name, rich_help_panel=panel)(getattr(module, name.replace("-", "_")))
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
    """Parse the arguments, run the command, and return its exit code; a usage error has code 2.

    Without `names_job` the first argument is the job of the settings, which nobody has typed.
    """
    as_json = "--json" in arguments
    if arguments[:1] == ["help"]:
        arguments = [*(word for word in arguments if word != "help"), "--help"]
    if arguments and arguments[0] in COMMANDS:
        name_job(arguments[0])
    try:
        app = application(arguments[0] if arguments else None)
        code: object = app(list(arguments), prog_name="dlqbatch", standalone_mode=False)
    except typer.TyperException as error:
        _print_usage_error(error, as_json=as_json, names_job=names_job)
        return error.exit_code
    except DlqbatchError as error:
        return print_error(error, as_json=as_json)
    return code if isinstance(code, int) else 0


def _print_usage_error(error: typer.TyperException, *, as_json: bool, names_job: bool) -> None:
    text = error.format_message().strip()
    context: typer.Context | None = getattr(error, "ctx", None)
    # There is no text after a group without a command: its help page has just been printed.
    if text:
        path = context.command_path if context is not None else ""
        hint = f"\n`{path if names_job else 'dlqbatch'} --help` shows what there is." if path else ""
        print_failure("UsageError", text + hint, error.exit_code, as_json=as_json)
