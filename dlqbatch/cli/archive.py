"""`dlqbatch archive`: show what is in cold storage, and restore messages from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import typer

from dlqbatch.cli import timeline
from dlqbatch.cli.options import (
    Actor,
    AsJson,
    Commands,
    DryRun,
    Full,
    JournalReason,
    Revealing,
    ScopedSettings,
    Settings,
)
from dlqbatch.cli.printing import NOTHING, PARTIAL, print_changes, print_json, print_lines, print_table, remark
from dlqbatch.retain.archive import archive as cold_archive

app = Commands(
    help="""Cold storage: what retain has put there, and the way back.

    dlqbatch archive list --verify
    dlqbatch archive restore 4711 --reason "asked for by the auditors"
    """,
)

_WHICH: Final = "The number that a message had in the dead store, or its identity."


@app.command("list")
def list_parts(
    *,
    settings: Settings,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every part and compare it with its checksums.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the parts of cold storage, the newest first.

    dlqbatch archive list --verify
    """
    archive = cold_archive(settings)
    survey = archive.survey()
    read = archive.verify(survey) if verify else {}
    wrong = {damage.part: damage.why for damage in survey.damaged}
    wrong |= {part: damage.why for part, damage in read.items() if damage is not None}
    rows = [
        {
            "day": each.day,
            "part": each.part,
            "messages": each.count,
            "first": each.first_id,
            "last": each.last_id,
            "bytes": each.file_bytes,
            "written": timeline.time(each.created),
            "state": "damaged" if each.part in wrong else "verified" if each.part in read else "not read",
        }
        for each in survey.parts
    ]
    if as_json:
        damaged = [{"part": part, "why": why} for part, why in sorted(wrong.items())]
        rests = {"replaced": list(survey.replaced)} if survey.replaced else {}
        print_json({"parts": rows, "damaged": damaged, "unfinished": list(survey.unfinished)} | rests)
    else:
        if rows:
            print_table(rows, below=("first", "last", "bytes", "written"))
        for part, why in sorted(wrong.items()):
            remark(f"{part} is damaged: {why}")
        for part in survey.unfinished:
            remark(f"{part} has no manifest and is not read")
        for part in survey.replaced:
            remark(f"{part} was written anew by an erase, which was cut: `dlqbatch messages erase` again removes it")
        copies = f"{sum(each.count for each in survey.parts)} copies in {len(rows)} part(s)"
        remark(copies if rows else "nothing found")
    where = archive.settings.cold_storage
    if isinstance(where, Path) and not where.is_dir():
        remark(
            f"there is no folder {where}: mount its disk, or correct cold_storage; the first copy that retain makes "
            "makes the folder too, if the one that it is in is there"
        )
    is_whole = not wrong and not survey.unfinished and not survey.replaced
    raise typer.Exit(PARTIAL if not is_whole else 0 if rows else NOTHING)


@app.command()
def show(
    which: Annotated[str, typer.Argument(metavar="ID", help=_WHICH)],
    *,
    settings: Settings,
    full: Full = False,
    by: Revealing = None,
    as_json: AsJson = False,
) -> None:
    """Show the newest cold copy of a message, as it was when it was copied.

    Secrets are masked. With --json it is complete, the body as base64.

    dlqbatch archive show 4711
    """
    copy, part = cold_archive(settings).show(which, by)
    if as_json:
        print_json(copy.as_dict() | {"part": part})
        return
    print_lines(timeline.message(copy, {"cold copy": part}, full=full))


@app.command()
def restore(
    which: Annotated[list[str], typer.Argument(metavar="ID", help=_WHICH)],
    reason: JournalReason,
    *,
    settings: ScopedSettings,
    actor: Actor,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Bring messages back into the dead store: they are manual then, and wait for a person.

    The cold copy stays where it is.

    dlqbatch archive restore 4711 --reason "asked for by the auditors"
    """
    archive = cold_archive(settings)
    # An id that is named twice, also as 7 and 007, is restored once, so that changes and ids can be paired.
    asked = list({_without_zeros(each): each for each in which}.values())
    done = archive.restore(asked, actor=actor, reason=reason, dry_run=dry_run)
    pairs = zip(asked, done.changes, strict=True)
    changes = tuple(replace(change, asked=each, id=change.id or None) for each, change in pairs)
    raise typer.Exit(print_changes(replace(done, changes=changes), "restored", as_json=as_json))


def _without_zeros(which: str) -> str:
    is_number = which.isascii() and which.isdigit() and len(which) < len(str(2**63))
    return which.lstrip("0") if is_number else which
