"""Options that every command has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from dlqbatch import logs
from dlqbatch.cli.configuration import settings_from

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlqbatch import settings as configuration

AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON for a program.")]
DryRun: TypeAlias = Annotated[bool, typer.Option("--dry-run", help="Show what would happen; move and change nothing.")]
Config: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="The application.properties to read, before the one that DLQBATCH_CONFIG names.",
    ),
]
Settings: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="OPTION=VALUE",
        help="Any setting of docs/settings.md, such as -s queue_type=quorum. Repeatable.",
    ),
]
MaxMessages: TypeAlias = Annotated[
    int | None, typer.Option(help="Take at most so many messages; else as the setting says.")
]
MaxBytes: TypeAlias = Annotated[
    str | None, typer.Option(help="Stop taking after so many bytes of bodies, such as 64MiB.")
]
MaxSeconds: TypeAlias = Annotated[float | None, typer.Option(help="Take messages for at most so many seconds.")]


def overrides(settings: list[str] | None, given: Mapping[str, object] | None = None) -> dict[str, object]:
    """What the command line says of the settings; a flag of its own wins over --set."""
    found: dict[str, object] = {}
    for pair in settings or ():
        option, equals, value = pair.partition("=")
        if not equals:
            # What was given may be an address with its password, so that it is not repeated.
            raise typer.BadParameter("it takes OPTION=VALUE, such as -s queue_type=quorum", param_hint="--set")
        found[option.strip().replace("-", "_")] = value
    return found | {option: value for option, value in (given or {}).items() if value is not None}


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
