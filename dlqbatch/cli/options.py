"""Options and arguments that several commands have, and what they mean for the settings."""

from __future__ import annotations

import getpass
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import typer

from dlqbatch import logs
from dlqbatch import settings as configuration
from dlqbatch.cli.run import settings_from
from dlqbatch.settings.sources import Spelled
from dlqbatch.store.states import Status

AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON for a program.")]
DryRun: TypeAlias = Annotated[bool, typer.Option("--dry-run", help="Show what would happen; move and change nothing.")]
Config: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="The properties file, instead of DLQBATCH_CONFIG's.",
    ),
]
Settings: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="OPTION=VALUE",
        help="Any setting of docs/settings.md. Repeatable.",
    ),
]
MaxMessages: TypeAlias = Annotated[
    int | None, typer.Option(help="Take at most so many messages; else as the setting says.")
]
MaxBytes: TypeAlias = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Stop taking after so many bytes of bodies, such as 64MiB.")
]
MaxSeconds: TypeAlias = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="Take messages for at most so many seconds.")
]
Prometheus: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--prometheus", metavar="FILE", help="Also write the metrics there, for the textfile collector of Prometheus."
    ),
]


def overrides(settings: list[str] | None, given: Mapping[str, object] | None = None) -> dict[str, object]:
    """What the command line says of the settings; a flag of its own wins over --set."""
    found: dict[str, object] = {}
    for pair in settings or ():
        option, equals, value = pair.partition("=")
        if not equals:
            # What was given may be an address with its password, so that it is not repeated.
            raise typer.BadParameter("it takes OPTION=VALUE, such as -s queue_type=quorum", param_hint="--set")
        name = option.strip().replace("-", "_")
        found[Spelled(name, f"-s {name}")] = value
    flags = {option: value for option, value in (given or {}).items() if value is not None}
    return {option: value for option, value in found.items() if option not in flags} | flags


def list_of(queues: list[str] | None) -> str | None:
    """The queues of an argument as a setting has them."""
    if queues is not None and not all(queue.strip() for queue in queues):
        raise typer.BadParameter("a queue's name is empty; leave it out to take the queues that the setting names")
    return ",".join(queues) if queues else None


def configured(
    settings: list[str] | None, config: Path | None, given: Mapping[str, object] | None = None
) -> configuration.Settings:
    """The settings of a command that is no run."""
    loaded = settings_from(overrides(settings, given), config)
    for warning in loaded.warnings:
        logs.get(__name__).warning("settings", problem=warning)
    return loaded


ROW_ID: Final = typer.Argument(metavar="ID", min=1, max=2**63 - 1, help="The number of a message, as list shows it.")
Statuses: TypeAlias = Annotated[
    list[Status] | None, typer.Option("--status", metavar="STATE", help="In this state. Repeatable.")
]
ErrorType: TypeAlias = Annotated[
    str | None, typer.Option("--error-type", metavar="TYPE", help="Failed with this type of error.")
]
Group: TypeAlias = Annotated[
    str | None, typer.Option("--group", metavar="GROUP", help="Of this group of equal failures.")
]
Event: TypeAlias = Annotated[str | None, typer.Option("--event", metavar="EVENT", help="Of this event.")]
Origin: TypeAlias = Annotated[str | None, typer.Option("--origin", metavar="QUEUE", help="Failed in this queue.")]
Since: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--since", "--start-date", metavar="TIME", help="Ingested then or later; a date is its first instant."
    ),
]
Until: TypeAlias = Annotated[
    str | None,
    typer.Option("--until", "--end-date", metavar="TIME", help="Ingested then or earlier; a date is its last instant."),
]
Text: TypeAlias = Annotated[
    str | None, typer.Option("--text", help="This text anywhere in the failure, the reason or an id.")
]
Limit: TypeAlias = Annotated[int, typer.Option("--limit", min=1, max=10_000, help="At most so many.")]
After: TypeAlias = Annotated[
    str | None, typer.Option("--after", metavar="NEXT", help="The next page: what this one named as its next.")
]
Ids: TypeAlias = Annotated[list[int], ROW_ID]
Actor: TypeAlias = Annotated[
    str | None,
    typer.Option("--actor", metavar="NAME", help="Who the journal says it was; else the user who runs this."),
]


def person(actor: str | None) -> str:
    if actor is not None:
        return actor
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        raise typer.BadParameter("this user has no name here; give one", param_hint="--actor") from None
