"""The page's part about each benchmark: what was compared, its picture, and its figures as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from page import table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_FOUR: Final = (
    "All take turns in the same run. `naive loop` is a pika `BlockingConnection` that gets, publishes with a confirm "
    "and acknowledges, one by one. `shovel plugin` is the broker's own mover (on-confirm, prefetch 1000); it decides "
    "nothing and changes no header. `limit` is a raw socket with frames encoded beforehand and everything pipelined; "
    "it does no work; `limit, consuming` has a consumer in place of gets. `dlqbatch drain` does all of its work: a "
    "policy of 1,000 rows, all headers, its report."
)
_MOST_MS: Final = 100
TEXTS: Final = {
    "drain": ("Drain, classic queues", _FOUR),
    "drain-quorum": ("Drain, quorum queues", "Source and target are quorum queues."),
    "drain-4.3": ("Drain, classic queues, RabbitMQ 4.3", "The same on the newer release."),
    "drain-quorum-4.3": ("Drain, quorum queues, RabbitMQ 4.3", "The same on the newer release."),
    "sizes": (
        "Drain of small and large bodies",
        (
            "Large bodies come in smaller numbers: 512 MiB in a turn at most. A drain has 28 MiB of bodies under way; "
            "the limit has 512 of them, whatever their size, and `limit, in as much memory` has as many as the drain."
        ),
    ),
    "memory": (
        "Memory",
        (
            "Each drain is a process of its own. Idle is what it has once it has drained one small message; the peak "
            "is the most that the kernel has seen (VmHWM). MB are 1,000,000 bytes."
        ),
    ),
    "depth": (
        "Depth of the queue",
        (
            "At each depth the limit and the drain take turns at the front of the queue, and what they took is put "
            "behind it again. At last one drain takes everything."
        ),
    ),
    "policies": (
        "Size of the policy",
        (
            "One event in ten is a pattern. Every message has a routing key of its own that only a pattern matches, "
            "so that no answer can be remembered. The time to load the policy is taken out of the rates, and stands "
            "below them."
        ),
    ),
    "scaling": ("Drains at once", "On the same queue; broker and drains share the machine. None lost, none doubled."),
    "jobs": (
        "The jobs of the dead store, and the check",
        (
            "On PostgreSQL. Each does its whole work on the same number of messages. Of those that the check looks "
            "at, 30 % move. CPU is that of a message: ours, the database's, the broker's."
        ),
    ),
    "jobs-100000": ("Replay and check of 100,000", "The same with many messages."),
    "replay_rate": ("Replay at a rate", "What reached the queue between its first message and its last."),
    "cold_start": (
        "Cold start",
        (
            "A new process each time, beside a bare script that imports pika, connects, declares the same and "
            "disconnects."
        ),
    ),
    "hot_path": (
        "Our own work for a message",
        (
            "With what a broker says played to the drain: no socket, no scheduler. `yardstick` is a plain loop over "
            "the same bytes."
        ),
    ),
    "dead_store": ("The dead store with few rows and with many", "On PostgreSQL; milliseconds, medians."),
    "store": ("What a message writes", "From its arrival in the dead store to its end, with one failed retry."),
    "cost": (
        "What a function takes",
        "Of each job as Lambda calls it. What it costs is in [aws.md](aws.md#what-it-costs).",
    ),
}


def section(name: str, result: Mapping[str, Any]) -> list[str]:
    title, text = TEXTS[name]
    lines = [f"### {title}", "", text, ""]
    if "failed" in result:
        return [*lines, f"**There is no result: {result['failed']}.**", ""]
    lines += [f"![{title}](../benchmarks/results/{name}.svg)", ""]
    return [*lines, *TABLES.get(str(result["benchmark"]), _rates)(result), *_rounds(result), ""]


def _rounds(result: Mapping[str, Any]) -> list[str]:
    if "rounds" not in result:
        return []
    number = result["rounds"]
    return ["", f"Medians of {number} rounds, in brackets the least and the most." if number > 1 else "One round."]


def _spread(seen: Mapping[str, float], shown: str = "{:,.0f}") -> str:
    median, least, most = (shown.format(seen[key]) for key in ("median", "least", "most"))
    return f"{median} ({least} to {most})"


def _rates(result: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for title, case in result["cases"].items():
        rows = []
        for name, figures in case["contenders"].items():
            cpus = (
                _spread(figures[key], "{:.1f}") if key in figures else ""
                for key in ("cpu_microseconds", "broker_cpu_microseconds")
            )
            ratio = _spread(figures["ratio"], "{:.2f}") if "ratio" in figures else ""
            rows.append((name, _spread(figures["per_second"]), *cpus, ratio))
        head = ["", "messages/s", "its CPU per message, µs", "the broker's", f"{case['of']} is so many times as fast"]
        shown = [column for column in range(5) if column in {0, 1} or any(row[column] for row in rows)]
        lines += [f"{title}:", "", *table([head[at] for at in shown], [[row[at] for at in shown] for row in rows]), ""]
    return lines[:-1]


def _jobs(result: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    head = ("", "messages/s", "our CPU, µs", "the database's", "the broker's", "rate to the drain's")
    for title, case in result["cases"].items():
        rows = [
            (
                name,
                _spread(figures["per_second"]),
                *(
                    f"{figures[key]['median']:.1f}" if key in figures else ""
                    for key in ("cpu_microseconds", "database_cpu_microseconds", "broker_cpu_microseconds")
                ),
                _spread(figures["of_the_drain"], "{:.2f}") if "of_the_drain" in figures else "",
            )
            for name, figures in case["contenders"].items()
        ]
        lines += [f"{title}:", "", *table(head, rows), ""]
    return lines[:-1]


def _memory(result: Mapping[str, Any]) -> list[str]:
    rows = [
        (title, kind, f"{each['messages']:,}", f"{each['idle_mb']['median']:.1f} MB", _megabytes(each))
        for title, case in result["cases"].items()
        for kind, each in case["drains"].items()
    ]
    return table(("", "queues", "messages", "idle", "peak over it"), rows)


def _megabytes(each: Mapping[str, Any]) -> str:
    return _spread(each["over_idle_mb"], "{:.1f}") + " MB"


def _depth(result: Mapping[str, Any]) -> list[str]:
    rows = [
        (title, f"{each['per_second']['median']:,.0f}", f"{each['over_idle_mb']['median']:.1f} MB")
        for title, each in result["whole"].items()
    ]
    return [*_rates(result), "", "All in one run:", "", *table(("", "messages/s", "peak over the idle process"), rows)]


def _policies(result: Mapping[str, Any]) -> list[str]:
    rows = [(title, _spread(took, "{:.3f}")) for title, took in result["loading"].items()]
    return [*_rates(result), "", *table(("policy", "seconds to load it"), rows)]


def _scaling(result: Mapping[str, Any]) -> list[str]:
    one = next(iter(result["drains"].values()))["per_second"]
    rows = [
        (
            number,
            f"{each['per_second']:,.0f} ({each['least']:,} to {each['most']:,})",
            f"{each['per_second'] / one:.2f}",
            f"{each['drain_microseconds']:.0f} µs",
            f"{each['broker_microseconds']:.0f} µs",
        )
        for number, each in result["drains"].items()
    ]
    return table(("drains", "messages/s", "rate to one's", "CPU of the drains per message", "of the broker"), rows)


def _cold_start(result: Mapping[str, Any]) -> list[str]:
    kinds = {"bare": "bare script", "empty": "a drain that finds nothing", "messages": "a drain of a few messages"}
    rows = [
        (
            name,
            _spread(result[f"{kind}_ms"], "{:.0f}") + " ms",
            _spread(result[f"{kind}_cpu_ms"], "{:.0f}") + " ms",
            _spread(result[f"{kind}_to_bare"], "{:.2f}") if kind != "bare" else "",
        )
        for kind, name in kinds.items()
    ]
    return table(("", "time", "CPU", "time to the bare script's"), rows)


def _hot_path(result: Mapping[str, Any]) -> list[str]:
    rows = [
        (
            stage,
            _spread(result[f"{stage}_cpu_microseconds"], "{:.1f}") + " µs",
            f"{result[f'{stage}_to_yardstick']:.2f}",
        )
        for stage in ("delay", "return")
    ]
    return table(("what becomes of a message", "our CPU", "to the yardstick's"), rows)


def _dead_store(result: Mapping[str, Any]) -> list[str]:
    stored = list(result["rows"])
    rows = [
        (name, *(f"{result['rows'][number][name]:,.1f}" for number in stored))
        for name in result["rows"][stored[0]]
        if name != "fill, s"
    ]
    return table(("", *(f"{int(number):,} rows" for number in stored)), rows)


def writes(result: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for name, shape in result["shapes"].items():
        rows = (
            (
                step,
                *(f"{seen[each]:,.0f}" for each in ("wal", "server", "ours")),
                *(f"{seen[each]:.1f}" for each in ("versions", "hot")),
            )
            for step, seen in shape["steps"].items()
        )
        head = ("", "WAL, bytes", "the server's CPU, µs", "our CPU, µs", "versions of rows", "of them heap-only")
        said = f"{name[0].upper()}{name[1:]}: a message takes {shape['disk']:,.0f} bytes of disk after it, unvacuumed."
        lines += [said, "", *table(head, rows), ""]
    return lines


def queries_of(sizes: Sequence[Mapping[str, Any]]) -> list[str]:
    """A row for each query of the dead store, a column for each number of messages; 100 ms of CPU time are bold."""
    names = dict.fromkeys(name for each in sizes for name in each["milliseconds"])
    rows = ((name, *(_query(each["milliseconds"].get(name)) for each in sizes)) for name in names)
    return table(("CPU, ms (median, p95)", *(f"{each['messages']:,}" for each in sizes)), rows)


def _query(seen: Mapping[str, float] | None) -> str:
    if seen is None:
        return ""
    cpu = seen["server"] + seen["ours"]
    shown = f"{cpu:,.1f} ({seen['median']:,.0f}, {seen['p95']:,.0f})"
    return f"**{shown}**" if cpu >= _MOST_MS else shown


def _cost(result: Mapping[str, Any]) -> list[str]:
    rows = []
    for job, runs in result["functions"].items():
        full = runs["full"]
        each = f"{full['cpu_seconds'] / full['messages'] * 1e6:,.0f} µs" if full else ""
        cold, empty = runs["cold"]["seconds"] * 1000, runs["empty"]["seconds"] * 1000
        rows.append((job, f"{cold:,.0f} ms", f"{empty:,.0f} ms", each, f"{runs['peak_mb']:,.0f} MB"))
    return table(("", "first run, nothing to do", "the next", "CPU per message", "most memory"), rows)


TABLES: dict[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "jobs": _jobs,
    "memory": _memory,
    "depth": _depth,
    "policies": _policies,
    "scaling": _scaling,
    "cold_start": _cold_start,
    "hot_path": _hot_path,
    "dead_store": _dead_store,
    "store": writes,
    "cost": _cost,
}
