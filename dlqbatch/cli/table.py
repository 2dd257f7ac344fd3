"""Tables for people, JSON for programs, from the same rows."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Final

from dlqbatch.logs import plain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_UNFOLDED: Final = 100_000
"""Columns, more than any row has."""


def show(rows: Sequence[Mapping[str, object]], columns: Sequence[str], *, as_json: bool) -> None:
    """Whatever a message or a database put into a cell is made safe for the terminal."""
    if as_json:
        sys.stdout.write(json.dumps([dict(row) for row in rows], default=str) + "\n")
        return
    from rich.console import Console  # noqa: PLC0415  (JSON needs none of it)
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        cells = ("" if row[column] is None else str(row[column]) for column in columns)
        table.add_row(*(Text(plain(cell)) for cell in cells))
    # In a pipe nothing is folded: a line is a row.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _UNFOLDED)
    with console.capture() as captured:
        console.print(table)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))
