"""`dlqbatch db`: show and upgrade the schema of the database, and print its SQL."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from dlqbatch import settings as configuration
from dlqbatch.cli.options import AsJson, Commands, DryRun, Settings
from dlqbatch.cli.printing import PARTIAL, print_table, remark
from dlqbatch.errors import DlqbatchError

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
        scope = _claim(settings)
        shown |= {"before": done.before, "after": done.after, "scope": scope}
        if scope is not None and done.before is not None and done.before != done.after:
            remark(f"what was there without a scope belongs to the first one that is known; this is {scope}")
    if not as_json:
        shown.pop("scope", None)
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


@app.command("backfill-fields")
def backfill_fields(
    settings: Settings,
    *,
    seconds: Annotated[
        float, typer.Option("--max-seconds", metavar="SECONDS", min=0, help="How long it may go on.")
    ] = 3600.0,
    again: Annotated[bool, typer.Option("--again", help="Begin anew, not where the last call ended.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read the fields of messages that were stored before dlqbatch.fields.… described them.

    Jobs may run beside it. It goes on where the last call ended.

    dlqbatch db backfill-fields --max-seconds 600
    """
    from dlqbatch.amqp.fields import Fields
    from dlqbatch.cli.run import Progress, on_signal
    from dlqbatch.messages.backfill_fields import backfill
    from dlqbatch.store.access import store_for

    progress = Progress()
    done = backfill(
        store_for(settings),
        Fields(settings.fields),
        seconds=seconds,
        again=again,
        stopped=on_signal(),
        progress=progress,
    )
    progress.end()
    shown = {"messages": done.messages, "up_to": done.last_id, "newest": done.newest_id, "complete": done.is_complete}
    print_table([shown], as_json=as_json)
    if not done.is_complete:
        remark("there is more: call it again, and it goes on from there")
        raise typer.Exit(PARTIAL)


def _claim(settings: configuration.Settings) -> str | None:
    """The scope of this deployment, which is known from now on; None if the broker does not say who it is."""
    from dlqbatch.jobs import store_by_asking

    try:
        return store_by_asking(settings, "dlqbatch db upgrade", dry_run=False)[1]
    except DlqbatchError as error:
        remark(f"the scope of this deployment is not known yet, its first run will tell: {error}")
        return None


def _word(is_there: bool, *, dry_run: bool) -> str:
    if is_there:
        return "up to date already"
    return "would be upgraded" if dry_run else "upgraded"
