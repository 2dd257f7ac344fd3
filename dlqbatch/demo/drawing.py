"""The messages' journeys as they happen, a picture on a terminal and lines elsewhere, and the table at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dlqbatch.demo.scenario import Kind, Result, Trail
from dlqbatch.logs import plain

_BAR_WIDTH: Final = 20


def drawing_on(console: Console, trails: Sequence[Trail]) -> Lines | Picture:
    return Picture(console, trails) if console.is_terminal and not console.is_dumb_terminal else Lines(console)


class Lines:
    """For a pipe: a line for every step."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, trail: Trail) -> None:
        """Draw the newest step of a message."""
        step = trail.steps[-1]
        line = f"{step.at:6.2f} s  {trail.part.event:<18} {step.where:<21} {step}"
        self._console.print(Text(plain(line)), soft_wrap=True)


class Picture:
    """For a terminal: a path for each message that grows as it goes, and where the message is now."""

    def __init__(self, console: Console, trails: Sequence[Trail]) -> None:
        self._trails = trails
        self._since: dict[str, float] = {}
        unicode = console.encoding.startswith("utf")
        self._rejected, self._acknowledged, self._to = ("✘", "✔", " → ") if unicode else ("x", "ok", " > ")
        self._live = Live(console=console, get_renderable=self._draw, refresh_per_second=12)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, trail: Trail) -> None:
        # Drawn anew several times a second in any case.
        self._since[trail.part.event] = time.monotonic()

    def _draw(self) -> RenderableType:
        lines: list[RenderableType] = []
        for trail in self._trails:
            lines += [Text.assemble((f"{trail.part.event:<19} ", "bold"), self._path(trail)), self._now(trail)]
        return Panel(Group(*lines), title="dlqbatch demo", title_align="left", border_style="dim")

    def _path(self, trail: Trail) -> Text:
        words = []
        for step in trail.steps:
            if step.kind is Kind.REJECTED:
                words.append(Text(self._rejected, "red"))
            elif step.kind is Kind.DELAYED:
                words.append(Text(f"tier {step.tier}", "yellow"))
            elif step.kind is Kind.PASSED:
                words.append(Text(f"{self._acknowledged} passed", "green"))
            elif step.kind is Kind.DEAD:
                words.append(Text("dead letters", "magenta"))
        return Text(self._to, "dim").join(words)

    def _now(self, trail: Trail) -> RenderableType:
        if not trail.steps:
            return Text()
        step = trail.steps[-1]
        if step.kind is not Kind.DELAYED:
            return Text(plain(f"  {step.at:5.1f} s, {step.where}: {step}"), "dim")
        waited = min(time.monotonic() - self._since[trail.part.event], step.ttl)
        line = Table.grid()
        line.add_row(
            Text(f"  {step.at:5.1f} s, {step.where}: ", "dim"),
            ProgressBar(step.ttl, waited, width=_BAR_WIDTH, complete_style="yellow", finished_style="yellow"),
            Text(f" {waited:.1f} of {step.ttl:g} s", "dim"),
        )
        return line


def conclude(console: Console, result: Result) -> None:
    """The table, what the drains did, and the verdict."""
    # A column for each message, not a row: so it fits 80 columns.
    table = Table("message", *(trail.part.event for trail in result.trails), box=None)
    rows: dict[str, Callable[[Trail], object]] = {
        "expected": lambda trail: trail.part.expected,
        "what happened": lambda trail: trail.outcome,
        "retries": lambda trail: trail.outcome.retries,
        "tiers": lambda trail: ", ".join(map(str, trail.outcome.tiers)) or "-",
        "where it is now": lambda trail: trail.outcome.where,
        "dlqbatch-reason": lambda trail: trail.outcome.reason or "-",
    }
    for name, cell in rows.items():
        cells = ((str(cell(trail)), "" if trail.is_as_expected else "red") for trail in result.trails)
        table.add_row(name, *(Text(plain(text), style) for text, style in cells))
    counts = result.counts
    console.print()
    console.print(table)
    console.print(
        f"\n{result.drains} drains in {result.seconds:.1f} s got {counts['got']} = {counts['delayed']} delayed "
        f"+ {counts['returned']} returned + {counts['dead_lettered']} dead-lettered + {counts['left']} left",
        highlight=False,
        soft_wrap=True,
    )
    for difference in result.differences:
        console.print(Text(plain(f"not as expected: {difference}"), "red"), soft_wrap=True)
    if not result.differences:
        console.print(Text("Everything went as expected.", "green"))
