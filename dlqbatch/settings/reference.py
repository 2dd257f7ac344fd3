"""The options as documentation: `python -m dlqbatch.settings.reference` prints both lists afresh."""

from __future__ import annotations

import sys
import textwrap

from dlqbatch.settings.options import OPTIONS, must_be, property_key
from dlqbatch.settings.sources import variable

_WIDTH = 100


def default_text(option: str) -> str:
    """Write an option's default as it would stand in application.properties."""
    info = OPTIONS[option]
    extra = info.json_schema_extra
    if isinstance(extra, dict) and extra["default_text"] is not None:
        return str(extra["default_text"])
    default = info.default
    if isinstance(default, tuple):
        return ",".join(str(part) for part in default)
    if isinstance(default, bool):
        return str(default).lower()
    return "" if default is None else f"{default:g}" if isinstance(default, float) else str(default)


def table() -> str:
    """Render the Markdown table of docs/settings.md."""
    lines = ["| property | variable | default | it must be | what it does |", "|---|---|---|---|---|"]
    for option, info in OPTIONS.items():
        default = default_text(option)
        shown = f"`{default}`" if default else ""
        names = f"`{property_key(option)}` | `{variable(option)}`"
        lines.append(f"| {names} | {shown} | {must_be(option)} | {info.description} |")
    return "\n".join(lines)


def commented() -> str:
    """Render the list in application.properties: every option, out of force, with its default."""
    blocks = []
    for option, info in OPTIONS.items():
        meaning = textwrap.wrap(f"{info.description} Must be {must_be(option)}.", _WIDTH, break_on_hyphens=False)
        blocks.append(
            "\n".join([*(f"# {line}" for line in meaning), f"#{property_key(option)}={default_text(option)}"])
        )
    return "\n\n".join(blocks)


if __name__ == "__main__":
    sys.stdout.write(f"{table()}\n\n{commented()}\n")
