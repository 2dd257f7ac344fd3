"""Bars as an SVG picture, readable on light and on dark pages; nothing but text is needed to draw them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

BAR: Final = 26
LEFT: Final = 190
WIDTH: Final = 430
RIGHT: Final = 130
STYLE: Final = (
    "text{font:12px sans-serif;fill:#24292f}.t{font-weight:bold}.n{text-anchor:end}"
    ".us{fill:#2f6f9f}.they{fill:#b8c4ce}.s{stroke:#24292f;stroke-width:1.5}"
    ".m{stroke:#b3261e;stroke-width:1.5;stroke-dasharray:4 3}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.us{fill:#4a9bd4}.they{fill:#57636e}"
    ".s{stroke:#e6edf3}.m{stroke:#ff8a80}}"
)


@dataclass(frozen=True, slots=True)
class Bar:
    """One figure with the spread it was seen in."""

    name: str
    value: float
    least: float
    most: float
    shown: str
    is_ours: bool = True


@dataclass(frozen=True, slots=True)
class Block:
    """Bars that are compared: they share a scale, and a mark if there is a bound."""

    title: str
    bars: Sequence[Bar]
    mark: float | None = None


def picture(blocks: Sequence[Block]) -> str:
    parts: list[str] = []
    y = 24
    for block in blocks:
        parts.append(f'<text x="8" y="{y}" class="t">{_xml(block.title)}</text>')
        y += 10
        top = y
        longest = max([bar.most for bar in block.bars] + [block.mark or 0.0]) or 1.0
        for bar in block.bars:
            parts += _bar(bar, y, WIDTH / longest)
            y += BAR
        if block.mark is not None:
            parts.append(f'<path d="M{LEFT + block.mark / longest * WIDTH:.1f} {top - 2}V{y - 4}" class="m"/>')
        y += 26
    size = f'width="{LEFT + WIDTH + RIGHT}" height="{y - 14}"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE}</style>\n{body}\n</svg>\n'


def _bar(bar: Bar, y: int, scale: float) -> list[str]:
    width, low, high = (value * scale for value in (bar.value, bar.least, bar.most))
    middle = y + BAR // 2 - 2
    kind = "us" if bar.is_ours else "they"
    return [
        f'<text x="{LEFT - 8}" y="{middle + 4}" class="n">{_xml(bar.name)}</text>',
        f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR - 6}" class="{kind}"/>',
        f'<path d="M{LEFT + low:.1f} {middle}H{LEFT + high:.1f}" class="s"/>',
        f'<text x="{LEFT + max(width, high) + 8:.1f}" y="{middle + 4}">{_xml(bar.shown)}</text>',
    ]


def _xml(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
