"""Options that say which dead messages are meant, and who asks."""

from __future__ import annotations

import getpass
from typing import Annotated, Final, TypeAlias

import typer

from dlqbatch.policy.lifecycle import Status

ROW_ID: Final = typer.Argument(metavar="ID", min=1, max=2**63 - 1, help="The number of a message, as list shows it.")

Statuses: TypeAlias = Annotated[list[Status] | None, typer.Option("--status", help="In this state. Repeatable.")]
ErrorType: TypeAlias = Annotated[str | None, typer.Option("--error-type", help="Failed with this type of error.")]
Group: TypeAlias = Annotated[str | None, typer.Option("--group", help="Of this group of equal failures.")]
Event: TypeAlias = Annotated[str | None, typer.Option("--event", help="Of this event.")]
Origin: TypeAlias = Annotated[str | None, typer.Option("--origin", help="Failed in this queue.")]
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
    str | None, typer.Option("--actor", help="Who the journal says it was; else the user who runs this.")
]


def person(actor: str | None) -> str:
    if actor is not None:
        return actor
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        raise typer.BadParameter("this user has no name here; give one", param_hint="--actor") from None
