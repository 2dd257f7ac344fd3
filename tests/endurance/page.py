"""The result as tables."""

from __future__ import annotations

from typing import Any

_HEAD = """\
# Endurance

One `dlqbatch schedule` works under load for a long time while something breaks every few seconds. Publishers bring
as many messages as are dealt with. Workers fail some of them once, some twice, some until the dead store sends them
again, and some always. Drain, ingest, lifecycle, check, monitor and retain run side by side. A run is killed, a
connection to the broker is closed, a session of PostgreSQL is ended, the broker raises its memory alarm, or it is
restarted. At the end a program that uses nothing of dlqbatch looks for every message.

```sh
scripts/endurance                             # an hour; servers of its own, two cores are enough
scripts/endurance --minutes 5 --seed 7        # shorter, and the same faults again
```

This page is written by `scripts/endurance --write`. The figures below are of one run.

"""


def whole(result: dict[str, Any]) -> str:
    return _HEAD + table(result)


def table(result: dict[str, Any]) -> str:
    lines = [
        f"Ran {result['seconds'] / 60:.1f} minutes, seed {result['seed']}, {result['at']}, "
        + ", ".join(f"{name} {value}" for name, value in result["versions"].items())
        + f". Published a second: {result['published_per_second']:g}.",
        "",
        *_rows("messages", result["messages"]),
        *_rows("faults", {name.replace("_", " "): number for name, number in result["faults"].items()}),
        *_rows("runs", result["runs"]),
        "| what must not grow | second half begins | ends | most | allowed growth |",
        "|---|---|---|---|---|",
    ]
    for name, one in result["gauges"].items():
        scale, unit = (1024 * 1024, " MiB") if name == "memory" else (1, "")
        values = [f"{one[key] / scale:.1f}{unit}" for key in ("first", "last", "most", "allowed")]
        lines.append(f"| {name.replace('_', ' ')} | {' | '.join(values)} |")
    lines += ["", f"Alerts that fired: {', '.join(result['alerts']) or 'none'}.", ""]
    problems = result["problems"]
    lines += [f"Problems: {'; '.join(problems)}." if problems else "No problem was found.", ""]
    return "\n".join(lines)


def _rows(title: str, values: dict[str, Any]) -> list[str]:
    return [f"| {title} | |", "|---|---|", *(f"| {name} | {number:,} |" for name, number in values.items()), ""]
