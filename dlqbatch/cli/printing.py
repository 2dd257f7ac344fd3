"""What the commands of the dead store print."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Final, Protocol

import typer

from dlqbatch.cli import table
from dlqbatch.cli.failure import PARTIAL
from dlqbatch.logs import plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

NOTHING: Final = 1
"""The exit code when nothing was found or changed."""
_MOST_SHOWN: Final = 50


def remark(text: str) -> None:
    sys.stderr.write(f"dlqbatch: {plain(text)}\n")


def print_json(value: object) -> None:
    sys.stdout.write(json.dumps(value, default=str) + "\n")


def print_lines(lines: Iterable[str]) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)


class Change(Protocol):
    @property
    def id(self) -> int | None: ...
    @property
    def before(self) -> str | None: ...
    @property
    def after(self) -> str | None: ...
    @property
    def is_done(self) -> bool: ...
    @property
    def why(self) -> str: ...
    @property
    def asked(self) -> str | None: ...


class Changes(Protocol):
    @property
    def changes(self) -> Sequence[Change]: ...
    @property
    def dry_run(self) -> bool: ...
    @property
    def done(self) -> int: ...
    @property
    def not_done(self) -> int: ...
    def as_dict(self) -> dict[str, object]: ...


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
            table.show(rows, tuple(rows[0]), as_json=False)
        if len(well) > _MOST_SHOWN:
            remark(f"and {len(well) - _MOST_SHOWN} more")
        remark(f"{done.done} {told}, {done.not_done} not")
    raise typer.Exit(NOTHING if not done.done else PARTIAL if done.not_done else 0)
