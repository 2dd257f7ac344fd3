"""Small drawings as inline SVG: a line of figures, a bar, and the way of a message with the depth of each queue.

Colours and widths of lines are in the style sheet; nothing here has a style of its own, which the policy of the pages
(CSP) would refuse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

_WIDTH: Final = 240
_HEIGHT: Final = 40
_NODE_WIDTH: Final = 168
_NODE_HEIGHT: Final = 40
_COLUMN: Final = 216
_ROW: Final = 52
_TOP: Final = 22
_LONGEST_NAME: Final = 24


def sparkline(numbers: Sequence[float], label: str) -> Markup:
    """A line of figures, the oldest at the left; the label says in words what it shows."""
    top = max(numbers, default=0) or 1
    step = _WIDTH / max(len(numbers) - 1, 1)
    points = [
        (round(i * step, 1), round(_HEIGHT - 2 - number / top * (_HEIGHT - 4), 1)) for i, number in enumerate(numbers)
    ]
    line = " ".join(f"{x},{y}" for x, y in points)
    area = f"0,{_HEIGHT} {line} {_WIDTH},{_HEIGHT}"
    return Markup(
        '<svg class="spark" viewBox="0 0 {} {}" preserveAspectRatio="none" role="img" aria-label="{}">'
        '<polygon class="area" points="{}"/><polyline class="line" points="{}"/></svg>'
    ).format(_WIDTH, _HEIGHT, label, area, line)


def bar(parts: Sequence[tuple[str, float]], whole: float, label: str) -> Markup:
    """Parts of a whole beside each other; the first word of each part is its class."""
    drawn, at = Markup(), 0.0
    for kind, number in parts:
        width = 100 * number / whole if whole else 0
        # What is not nothing can be seen.
        width = max(width, 0.6) if number else 0
        drawn += Markup('<rect class="{}" x="{}" y="0" width="{}" height="8"/>').format(
            kind, round(at, 2), round(min(width, 100 - at), 2)
        )
        at = min(at + width, 100)
    return Markup(
        '<svg class="bar" viewBox="0 0 100 8" preserveAspectRatio="none" role="img" aria-label="{}">'
        '<rect class="ground" x="0" y="0" width="100" height="8"/>{}</svg>'
    ).format(label, drawn)


@dataclass(frozen=True, slots=True)
class Station:
    """A queue on the way, or the dead store."""

    name: str
    note: str = ""
    """What stands below the name: the delay of a tier, for example."""
    depth: int | None = None
    """None: not known."""
    is_store: bool = False


def way(
    stations: Mapping[str, tuple[int, int, Station]],
    edges: Sequence[tuple[str, str]],
    titles: Sequence[str],
    label: str,
) -> Markup:
    """The way of a message from left to right: each station with its column and row, and who hands on to whom."""
    columns = max(column for column, _, _ in stations.values()) + 1
    rows = max(row for _, row, _ in stations.values()) + 1
    width, height = _COLUMN * columns - (_COLUMN - _NODE_WIDTH) + 2, _ROW * rows + 10
    drawn = Markup()
    for start, end in edges:
        (column, row, _), (to_column, to_row, _) = stations[start], stations[end]
        x1, y1 = column * _COLUMN + _NODE_WIDTH + 1, _TOP + row * _ROW + _NODE_HEIGHT // 2
        x2, y2 = to_column * _COLUMN + 1, _TOP + to_row * _ROW + _NODE_HEIGHT // 2
        bend = (_COLUMN - _NODE_WIDTH) // 2
        drawn += Markup('<path class="edge" d="M{} {}C{} {} {} {} {} {}"/>').format(
            x1, y1, x1 + bend, y1, x2 - bend, y2, x2, y2
        )
    for column, title in enumerate(titles):
        drawn += Markup('<text class="title" x="{}" y="12">{}</text>').format(column * _COLUMN + 1, title)
    for column, row, station in stations.values():
        drawn += _station(station, column * _COLUMN + 1, _TOP + row * _ROW)
    return Markup(
        '<svg class="way" viewBox="0 0 {w} {h}" width="{w}" height="{h}" role="img" aria-label="{label}">{drawn}</svg>'
    ).format(w=width, h=height, label=label, drawn=drawn)


def _station(station: Station, x: int, y: int) -> Markup:
    name = station.name if len(station.name) <= _LONGEST_NAME else f"{station.name[: _LONGEST_NAME - 1]}…"
    depth = "" if station.depth is None else f"{station.depth:,}"
    kind = "store" if station.is_store else "full" if station.depth else "empty"
    return Markup(
        '<g class="station {kind}"><title>{full}</title>'
        '<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="4"/>'
        '<text class="name" x="{tx}" y="{ny}">{name}</text>'
        '<text class="note" x="{tx}" y="{dy}">{note}</text>'
        '<text class="depth" x="{rx}" y="{dy}" text-anchor="end">{depth}</text></g>'
    ).format(
        kind=kind,
        full=f"{station.name}: {depth or 'not known'}",
        x=x,
        y=y,
        w=_NODE_WIDTH,
        h=_NODE_HEIGHT,
        tx=x + 8,
        rx=x + _NODE_WIDTH - 8,
        ny=y + 16,
        dy=y + 32,
        name=name,
        note=station.note,
        depth=depth,
    )
