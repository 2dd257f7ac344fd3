"""docs/performance.md, made of what the benchmarks have kept: no figure on it is typed by hand.

Usage: scripts/bench performance [--check] [--results FOLDER] [--page FILE]
`scripts/bench all --write` measures and calls it. --check writes nothing, and ends with 1 if the page or a picture is
another than what would be written.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from charts import blocks_of
from page import table
from plan import PLAN
from plot import picture
from sections import section
from targets import targets

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HERE: Final = Path(__file__).parent
RESULTS: Final = HERE / "results"
PAGE: Final = HERE.parent / "docs" / "performance.md"
NOTES: Final = {
    "speed-notes.md": "where the time of a drain goes, and what was tried",
}
VERSIONS: Final = {
    "python": "Python",
    "pika": "pika",
    "rabbitmq": "RabbitMQ",
    "erlang": "Erlang",
    "postgresql": "PostgreSQL",
}
INTRODUCTION: Final = """\
# How fast it is

<!-- Written by `scripts/bench all --write`, or from what is kept by `scripts/bench performance`; never by hand. -->

Contenders take turns in the same run, on the same machine, with the same messages: persistent, with the headers that a
broker and Spring leave on a failure, publisher confirms and `mandatory` everywhere. Rates of a machine say little about
another one, so look at the ratios: they are taken round by round, and what is shown is their median.
"""
QUICK: Final = """\
**These are figures of a quick run, with few messages: they show that the benchmarks work, and nothing else.**
"""
GUARD: Final = """\
## What keeps it fast

`tests/unit/test_hot_path.py` runs with every change. It plays a recorded broker to a drain, and compares the CPU
time of each message with that of a yardstick: a plain loop over the same bytes, in the same process. The test fails
if the ratio grows to a fifth more than a busy machine makes of it. There is no broker, socket or scheduler in it.
The two take turns, and of each the least of twelve counts: what else the machine does can only add to a turn, and
would have to add to all twelve of the one and to none of the other. A count that is nearly the same whatever else the
machine does: `.venv/bin/python benchmarks/hot_path.py --instructions` (with valgrind).

`tests/acceptance/test_benchmarks.py` runs each benchmark with next to no messages, and holds this page to the
results in `benchmarks/results`.
"""
AGAIN: Final = """\
## How to repeat it

```sh
scripts/bench all --write             # everything, at most 55 minutes; writes this page
scripts/bench all --quick             # does everything work?
scripts/bench all --write --only jobs # one of them again
scripts/bench drain --release 4.3     # a single one; --help tells its options
scripts/bench performance             # this page again, from benchmarks/results
```

Each benchmark starts private servers on loopback, and ends them. Nothing else should run meanwhile: the load average at
the beginning and the end of each is in the table above. A single one keeps its result in `build/benchmarks`.
"""


def read(folder: Path) -> dict[str, Any]:
    """What is kept of each benchmark, in the order of the plan."""
    files = {entry.name: folder / f"{entry.name}.json" for entry in PLAN}
    return {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items() if file.exists()}


def targets_in_words(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    found = targets(results)
    words = {True: "yes", False: "**no**", None: "not measured"}
    counts = [sum(target.is_met is met for target in found) for met in (True, False, None)]
    return [
        "{} are met, {} are not, {} were not measured.".format(*counts),
        "",
        *table(
            ("what", "target", "seen", "met"),
            ((target.what, target.wanted, target.seen, words[target.is_met]) for target in found),
        ),
    ]


def page(folder: Path) -> str:
    results = read(folder)
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    lines = [INTRODUCTION]
    if any(entry.get("quick") for entry in record["entries"].values()):
        lines.append(QUICK)
    notes = [f"- [{text}]({name})" for name, text in NOTES.items() if (PAGE.parent / name).exists()]
    lines += ["## Targets", "", *targets_in_words(results), ""]
    lines += ["## Where the time goes", "", *notes, ""] if notes else []
    lines += ["## Results", ""]
    for name, result in results.items():
        lines += section(name, result)
    lines += ["## Machine and versions", "", *_machine(record["machine"], results), "", *_runs(record["entries"]), ""]
    return "\n".join([*lines, GUARD, AGAIN])


def _machine(machine: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The versions are those that the benchmarks have met."""
    met: dict[str, set[str]] = {name: set() for name in VERSIONS}
    for result in results.values():
        about = result.get("about", result.get("machine", {}))
        for name in VERSIONS:
            if isinstance(about, dict) and name in about:
                met[name].add(str(about[name]))
    rows: list[tuple[str, str]] = [
        ("CPU", f"{machine['cores']} cores, {machine['cpu']}"),
        ("memory", machine["memory"]),
    ]
    rows.append(("system", machine["system"]))
    rows += [(title, ", ".join(sorted(met[name]))) for name, title in VERSIONS.items() if met[name]]
    return table(("", ""), rows)


def _runs(entries: Mapping[str, Any]) -> Sequence[str]:
    rows = [
        (
            f"`{told['command']}`",
            f"{told['began']} UTC",
            f"{told['seconds']} s",
            f"{told['load_at_begin']:.2f}, {told['load_at_end']:.2f}",
            "" if told["outcome"] == "done" else told["failure"].replace("|", "/"),
        )
        for told in entries.values()
        if told["outcome"] != "skipped"
    ]
    skipped = [f"{name}: {told['failure']}." for name, told in entries.items() if told["outcome"] == "skipped"]
    return [
        "Load is the average of one minute, before and after.",
        "",
        *table(("command", "began", "took", "load", "failure"), rows),
        *(["", *skipped] if skipped else []),
    ]


def write(folder: Path, file: Path = PAGE) -> None:
    for path, text in _files(folder, file).items():
        path.write_text(text, encoding="utf-8")
    sys.stderr.write(f"{file} is written\n")


def _files(folder: Path, file: Path) -> dict[Path, str]:
    pictures = {folder / f"{name}.svg": picture(blocks_of(result)) for name, result in read(folder).items()}
    return {**pictures, file: page(folder)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    if not options.check:
        write(options.results, options.page)
        return 0
    other = [
        path
        for path, text in _files(options.results, options.page).items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path in other:
        sys.stderr.write(f"{path} is not what its results make of it: run scripts/bench performance\n")
    return int(bool(other))


if __name__ == "__main__":
    sys.exit(main())
