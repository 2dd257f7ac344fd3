"""Small charts out of characters; plain ASCII where the other side may not show more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

_STEPS: Final = "▁▂▃▄▅▆▇█"
_ASCII_STEPS: Final = "_.:-=+*#"
_EIGHTHS: Final = " ▏▎▍▌▋▊▉"


def sparkline(numbers: Sequence[float], *, ascii_only: bool) -> str:
    """One character for each number; only zero looks like zero, and only the largest is full."""
    steps = _ASCII_STEPS if ascii_only else _STEPS
    top = max(numbers, default=0)
    if not top:
        return steps[0] * len(numbers)
    last = len(steps) - 1
    return "".join(steps[max(1, round(number / top * last))] if number else steps[0] for number in numbers)


def bar(number: float, top: float, width: int, *, ascii_only: bool) -> str:
    """`width` characters at most; whatever is not zero is seen."""
    if not number or not top:
        return ""
    if ascii_only:
        return "#" * max(1, round(number / top * width))
    eighths = max(1, round(number / top * width * 8))
    whole, part = divmod(eighths, 8)
    return "█" * whole + (_EIGHTHS[part] if part else "")
