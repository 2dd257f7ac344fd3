"""What commands print: tables for people, JSON for programs, remarks on stderr.

No value in a table is ever cut or folded: ids, hashes and errors are copied into the next command. A row that is wider
than the terminal takes more lines of its own. In a pipe a line is a row.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import typer

from dlqbatch.cli.failure import PARTIAL
from dlqbatch.logs import plain

if TYPE_CHECKING:  # it needs SQLAlchemy, which most commands do not
    from dlqbatch.messages.actions import Changes

NOTHING: Final = 1
"""The exit code when nothing was found or changed."""
_MOST_SHOWN: Final = 50


def remark(text: str) -> None:
    sys.stderr.write(f"dlqbatch: {plain(text)}\n")


def print_json(value: object) -> None:
    sys.stdout.write(json.dumps(value, default=str) + "\n")


def print_lines(lines: Iterable[str]) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)


def show_changes(done: Changes, word: str, *, as_json: bool) -> None:
    if as_json:
        print_json(done.as_dict())
    else:
        told = f"would be {word}" if done.dry_run else word
        # What stood in the way is always shown; of what went well, a screen.
        well = [one for one in done.changes if one.is_done]
        rows = [
            {
                **({"asked": one.asked} if one.asked is not None else {}),
                "id": one.id,
                "before": one.before,
                "after": one.after,
                "done": ": ".join(filter(None, (told if one.is_done else "no", one.why))),
            }
            for one in [*well[:_MOST_SHOWN], *(one for one in done.changes if not one.is_done)]
        ]
        if rows:
            print_table(rows)
        if len(well) > _MOST_SHOWN:
            remark(f"and {len(well) - _MOST_SHOWN} more")
        remark(f"{done.done} {told}, {done.not_done} not")
    raise typer.Exit(NOTHING if not done.done else PARTIAL if done.not_done else 0)


_GAP: Final = "  "
_INDENT: Final = "    "
_NOTHING: Final = "-"
"""An empty value below the first line, where nothing else tells one column from the next."""


def print_table(
    rows: Sequence[Mapping[str, object]],
    *,
    as_json: bool = False,
    columns: Sequence[str] = (),
    below: Sequence[str] = (),
    dropped: Sequence[str] = (),
) -> None:
    """Whatever a message or a database put into a cell is made safe for the terminal.

    On a narrow terminal the columns of `below` go to the next line of their row, in this order and only as many as
    have to. Then those of `dropped` are left out, then the last columns go below as well; the first one stays.
    """
    if as_json:
        print_json([dict(row) for row in rows])
        return
    columns = columns or tuple(rows[0])
    from rich.cells import cell_len
    from rich.console import Console
    from rich.text import Text

    cells = [{column: "" if row[column] is None else plain(str(row[column])) for column in columns} for row in rows]
    widths = {column: max(map(cell_len, (column, *(row[column] for row in cells)))) for column in columns}
    console = Console(highlight=False)
    most = console.width if sys.stdout.isatty() else None
    first, moved = _layout(widths, most, below, dropped)

    def lines(row: Mapping[str, str]) -> list[str]:
        padded = _GAP.join(row[column] + " " * (widths[column] - cell_len(row[column])) for column in first)
        found = [padded.rstrip()]
        for number, column in enumerate(moved):
            value = row[column] or _NOTHING
            if number and most is not None and cell_len(found[-1]) + len(_GAP) + cell_len(value) <= most:
                found[-1] += _GAP + value
            else:
                found.append(_INDENT + value)
        return found

    with console.capture() as captured:
        for line in lines({column: column for column in columns}):
            console.print(Text(line, style="bold"), soft_wrap=True)
    sys.stdout.write(captured.get())
    sys.stdout.writelines(f"{line}\n" for row in cells for line in lines(row))


def _layout(
    widths: Mapping[str, int], most: int | None, below: Sequence[str], dropped: Sequence[str]
) -> tuple[list[str], list[str]]:
    """The columns of the first line of each row, and those that follow below it."""
    first, moved = list(widths), set()
    for column in (*below, *dropped, *reversed(list(widths)[1:])):
        if most is None or sum(widths[one] for one in first) + len(_GAP) * (len(first) - 1) <= most:
            break
        if column in first:
            first.remove(column)
            if column not in dropped:
                moved.add(column)
    return first, [column for column in widths if column in moved]
