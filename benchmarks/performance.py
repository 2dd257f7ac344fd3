"""docs/performance.md, made of what the benchmarks have kept: no figure on it is typed by hand.

Usage: scripts/bench performance [--check | --details] [--results FOLDER] [--page FILE]
`scripts/bench all --write` measures and calls it. --check writes nothing, and ends with 1 if the page or a picture is
another than what would be written. --details writes nothing either, and shows all figures as tables.
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
from sections import TEXTS, queries_of, section, writes
from targets import DRAIN, LIMIT, NAIVE, SHOVEL, targets

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from targets import Target

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

This page compares dlqbatch with other ways to do the same work, and with its own targets. All contenders take turns in
the same run, on the same machine, with the same persistent messages of 1 KiB, publisher confirms and `mandatory`.
Rates depend on the machine, so look at the ratios. They are taken round by round. All figures are medians.
"""
DRAINS: Final = """\
The *naive loop* is a pika `BlockingConnection` that gets, publishes and acknowledges one by one. The *shovel plugin*
is the broker's own mover, which decides nothing and changes no header. The *limit* is a raw socket that sends frames
that were encoded beforehand. The *drain* does all of its work: a policy of 1,000 rows, all headers, its report.
"""
JOBS: Final = """\
The jobs of the dead store on PostgreSQL. *Row and commit* is a loop that stores each message in its own transaction.
CPU is that of one message.
"""
WRITES: Final = """\
What one message makes PostgreSQL write from its arrival in the dead store to its end: one retry fails, and the next one
is resolved. Its body has {body:,} bytes, its stack {stack:,}.
"""
QUERIES: Final = """\
What jobs and people ask the dead store. `scripts/bench rows` has PostgreSQL make the messages: a body of 50 bytes, two
fields each, states and ages as retention leaves them, and where there are a million of them {groups:,} pairs of a group
and a queue. Each figure is the CPU time that the database and this program take together, which changes little with
what else the machine does; in brackets the time by the clock beside that other work, median and 95th percentile. What
takes 100 ms of CPU time or more is bold. PostgreSQL has its usual settings (128 MB of shared buffers), but waits for no
disk, and answers a query by one process.
"""
MISSED: Final = """\
What still grows with the store, and why:

- *Groups by a field, a time, a text or an edit*: one index finds the messages of the filter, and each of them is read
  for its state. The more messages have the value, the longer it takes, up to the newest 20,000 that match. The
  10,000,000 were measured before error types, events and sources were counted too, and read each message for them.
- *Figures of status and monitor*, and the page that shows them: outcomes of the last hour, the newest 10,000 errors of
  the day and 3,000 replayed messages are read from their rows. The page reads them at most every two seconds, for all
  who look at it. More than half of a page is our own time.
- *The status of a plan* and *a plan*: the outcome of each item is looked up, and each message is frozen.
- *Many groups*: counts are read whole. With 300,000 messages in 77,000 pairs of a group and a queue `groups` took
  111 ms of CPU time, groups by queue 75 ms, the figures 200 ms, and the groups for the first time 95 ms.

`tests/integration/store/test_every_query.py` asks all of it of 20,000 messages, and holds the rows that PostgreSQL
reads to the bounds of the program.
"""
RATIOS: Final = """\
"To" is the ratio of rates (of times for a cold start); "stretched" is a target beyond the first one.
"""
_BESIDE: Final = (DRAIN, LIMIT, SHOVEL, NAIVE)
QUICK: Final = """\
**These are figures of a quick run, with few messages: they show that the benchmarks work, and nothing else.**
"""
GUARD: Final = """\
## What keeps it fast

`tests/unit/drain/test_hot_path.py` plays a recorded broker to a drain, and compares the CPU time of a message with that
of a plain loop over the same bytes in the same process. It fails if the ratio grows by a fifth. For an exact count, run
`.venv/bin/python benchmarks/hot_path.py --instructions` (with valgrind).
`tests/acceptance/docs/test_benchmarks.py` runs
each benchmark with few messages, and holds this page to `benchmarks/results`.
"""
AGAIN: Final = """\
## How to repeat it

```sh
scripts/bench all --write              # everything, at most 55 minutes; writes this page
scripts/bench all --quick              # does everything work?
scripts/bench all --write --only jobs  # one of them again
scripts/bench drain --release 4.3      # a single one; --help shows its options
scripts/bench store --beside main --write  # what a message writes, beside another commit
scripts/bench rows --rows 1000,1000000,10000000 --write  # every query; 10,000,000 take an hour and 25 GB of disk
scripts/bench performance              # this page again, from benchmarks/results
scripts/bench performance --details    # all figures as tables
```

Each benchmark starts private servers and ends them. Nothing else should run meanwhile. A single one keeps its result in
`build/benchmarks`.
"""


def read(folder: Path) -> dict[str, Any]:
    """What is kept of each benchmark, in the order of the plan."""
    files = {entry.name: folder / f"{entry.name}.json" for entry in PLAN}
    return {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items() if file.exists()}


def targets_in_words(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The targets of each drain side by side, then all others; what is missed is bold."""
    found = targets(results)
    met, missed, unknown = (sum(target.is_met is met for target in found) for met in (True, False, None))
    drains: dict[str, dict[str, str]] = {}
    others: list[tuple[str, ...]] = []
    for target in found:
        where, is_drain, what = target.what.partition(": ")
        if is_drain and where.startswith("drain, "):
            drains.setdefault(where, {})[what] = _bold(target, f"{target.seen} ({target.wanted})")
        else:
            others.append((target.what, target.wanted, _bold(target, target.seen)))
    columns = list(dict.fromkeys(what for cells in drains.values() for what in cells))
    rows = [(where, *(cells.get(what, "") for what in columns)) for where, cells in drains.items()]
    lines = [f"{met} are met, {missed} are missed (bold), {unknown} were not measured.", ""]
    lines += [*table(("", *columns), rows), ""] if rows else []
    return lines + table(("what", "target", "seen"), others)


def _bold(target: Target, text: str) -> str:
    return f"**{text}**" if target.is_met is False else text


def page(folder: Path) -> str:
    results = read(folder)
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    lines = [INTRODUCTION]
    if any(entry.get("quick") for entry in record["entries"].values()):
        lines.append(QUICK)
    lines += ["## Rates", ""]
    if drains := _drains(results):
        lines += [DRAINS, *drains, "", "![Drain, classic queues](../benchmarks/results/drain.svg)", ""]
    if jobs := _jobs(results):
        lines += [JOBS, *jobs, ""]
    if "shapes" in (store := results.get("store", {})):
        lines += ["## What a message writes", "", WRITES.format_map(store), *writes(store)]
    if (rows := folder / "rows.json").exists():
        lines += ["## Every query of the dead store", "", *_queries(json.loads(rows.read_text(encoding="utf-8")))]
    lines += ["## Targets", "", RATIOS, *targets_in_words(results), "", "## More results", ""]
    lines += [f"- **{TEXTS[name][0]}: there is no result: {result['failed']}.**" for name, result in _failed(results)]
    pictures = (
        f"[{TEXTS[name][0]}](../benchmarks/results/{name}.svg)"
        for name, result in results.items()
        if "failed" not in result
    )
    lines += ["- Pictures: " + ", ".join(pictures) + "."]
    lines += [f"- [{text}]({name})" for name, text in NOTES.items() if (PAGE.parent / name).exists()]
    lines += ["", *_machine(record["machine"], results), "", *_runs(record["entries"]), ""]
    return "\n".join([*lines, GUARD, AGAIN])


def _queries(result: Mapping[str, Any]) -> list[str]:
    sizes = sorted(result["sizes"].values(), key=lambda each: each["messages"])
    groups = max(each["groups and queues"] for each in sizes)
    busy = [
        f"{each['messages']:,} messages in {each['bytes'] / 1e9:,.1f} GB: {each['at']} UTC, {each['rounds']} rounds "
        f"at a load of {each['load'][0]:g} to {each['load'][2]:g}"
        for each in sizes
    ]
    return [QUERIES.format(groups=groups), *queries_of(sizes), "", f"{'; '.join(busy)}.", "", MISSED]


def details(folder: Path) -> str:
    """All figures of all benchmarks as tables."""
    return "\n".join(line for name, result in read(folder).items() for line in section(name, result))


def _failed(results: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(name, result) for name, result in results.items() if "failed" in result]


def _contenders(results: Mapping[str, Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """Of the only case of a benchmark; nothing if there is no result."""
    result = results.get(name, {})
    if "cases" not in result:
        return {}
    found: Mapping[str, Any] = next(iter(result["cases"].values()))["contenders"]
    return found


def _drains(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    rows = []
    for name in ("drain", "drain-quorum", "drain-4.3", "drain-quorum-4.3"):
        if not (seen := _contenders(results, name)):
            continue
        rates = (f"{seen[each]['per_second']['median']:,.0f}" if each in seen else "" for each in _BESIDE)
        cpu = f"{seen[DRAIN]['cpu_microseconds']['median']:.1f} µs"
        title = f"{'quorum' if 'quorum' in name else 'classic'}, {results[name]['machine']['rabbitmq']}"
        rows.append((title, *rates, cpu))
    head = ("messages a second", "dlqbatch drain", *_BESIDE[1:], "CPU of the drain per message")
    return table(head, rows) if rows else []


def _jobs(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    rows = []
    for name, seen in _contenders(results, "jobs").items():
        keys = ("cpu_microseconds", "database_cpu_microseconds", "broker_cpu_microseconds")
        cpus = (f"{seen[key]['median']:.1f} µs" if key in seen else "" for key in keys)
        rows.append((name, f"{seen['per_second']['median']:,.0f}", *cpus))
    head = ("", "messages a second", "our CPU", "the database's CPU", "the broker's CPU")
    return table(head, rows) if rows else []


def _machine(machine: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The versions are those that the benchmarks have met."""
    met: dict[str, set[str]] = {name: set() for name in VERSIONS}
    for result in results.values():
        about = result.get("about", result.get("machine", {}))
        for name in VERSIONS:
            if isinstance(about, dict) and name in about:
                met[name].add(str(about[name]))
    versions = [f"{title} {' and '.join(sorted(met[name]))}" for name, title in VERSIONS.items() if met[name]]
    where = f"{machine['cores']} cores, {machine['cpu']}, {machine['memory']}, {machine['system']}"
    return [f"Machine: {where}; {', '.join(versions)}."]


def _runs(entries: Mapping[str, Any]) -> Sequence[str]:
    """When they ran and beside what load; each failure."""
    ran = [told for told in entries.values() if told["outcome"] != "skipped"]
    began = sorted(told["began"] for told in ran)
    loads = [told["load_at_begin"] for told in ran]
    lines = (
        [f"Measured from {began[0]} to {began[-1]} UTC; load when each began: at most {max(loads):.2f}."] if ran else []
    )
    lines += [
        f"- **{name} failed: {told['failure']}.**" for name, told in entries.items() if told["outcome"] == "failed"
    ]
    lines += [
        f"- {name} was skipped: {told['failure']}." for name, told in entries.items() if told["outcome"] == "skipped"
    ]
    return lines


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
    parser.add_argument("--details", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    if options.details:
        sys.stdout.write(details(options.results))
        return 0
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
