"""`dlqbatch db`: show and upgrade the schema of the database, and print its SQL."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from dlqbatch.cli.options import AsJson, Commands, DryRun, Settings
from dlqbatch.cli.printing import print_table, remark

app = Commands(
    help="""The schema of the database.

    dlqbatch db upgrade
    """,
)

_NONE: Final = "none"


class Dialect(StrEnum):
    postgresql = "postgresql"
    sqlite = "sqlite"


@app.command()
def upgrade(settings: Settings, *, dry_run: DryRun = False, as_json: AsJson = False) -> None:
    """Bring the schema up to date; an existing dlq_event_config is adopted as it is.

    dlqbatch db upgrade --dry-run
    dlqbatch db upgrade
    """
    from dlqbatch.store import migrate

    url = settings.database_url.get_secret_value()
    shown: dict[str, object] = {"database": str(settings.database_url)}
    if dry_run:
        would = migrate.planned(url, connect_timeout=settings.connect_timeout_seconds)
        shown |= {"before": would.before, "after": would.after}
    else:
        if settings.database_url_is_default:
            Path(url.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
        done = migrate.upgrade(url, connect_timeout=settings.connect_timeout_seconds, waits=remark)
        shown |= {"before": done.before, "after": done.after}
    if not as_json:
        shown["before"] = shown["before"] or _NONE
        shown["done"] = _word(shown["before"] == shown["after"], dry_run=dry_run)
    print_table([shown], as_json=as_json)


@app.command()
def current(settings: Settings, *, as_json: AsJson = False) -> None:
    """Show the schema's version, and the newest that there is; none before the first upgrade.

    dlqbatch db current
    """
    from dlqbatch.store import migrate

    version = migrate.current(
        settings.database_url.get_secret_value(), connect_timeout=settings.connect_timeout_seconds
    )
    newest = migrate.latest()
    shown = {"database": str(settings.database_url), "version": version, "newest": newest}
    if not as_json:
        shown["version"] = version or _NONE
    print_table([shown], as_json=as_json)
    if version is None or version < newest:
        remark("`dlqbatch db upgrade` brings it up to date; --dry-run shows what that is")


@app.command()
def sql(
    dialect: Annotated[Dialect, typer.Argument(help="Whose SQL.")] = Dialect.postgresql, *, as_json: AsJson = False
) -> None:
    """Print everything that `upgrade` does to an empty database; it connects to none.

    dlqbatch db sql sqlite
    """
    from dlqbatch.store import migrate

    text = migrate.sql(dialect.value)
    sys.stdout.write(json.dumps({"dialect": dialect.value, "sql": text}) + "\n" if as_json else text)


@app.command()
def grants(*, as_json: AsJson = False) -> None:
    """Print the rights of each role on PostgreSQL as SQL (docs/permissions.md); it connects to no database.

    dlqbatch db grants
    """
    from dlqbatch.store import migrate

    text = migrate.grants()
    sys.stdout.write(json.dumps({"dialect": Dialect.postgresql, "sql": text}) + "\n" if as_json else text)


def _word(is_there: bool, *, dry_run: bool) -> str:
    if is_there:
        return "up to date already"
    return "would be upgraded" if dry_run else "upgraded"
