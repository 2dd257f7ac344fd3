"""What the picture of each benchmark shows, from what it has kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plot import Bar, Block

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


def blocks_of(result: Mapping[str, Any]) -> list[Block]:
    """Nothing, if the benchmark did not come to an end."""
    if "failed" in result:
        return []
    return list(CHARTS.get(str(result.get("benchmark")), _rates)(result))


def _rates(result: Mapping[str, Any]) -> Iterator[Block]:
    for title, case in result["cases"].items():
        bars = [
            _spread(name, figures["per_second"], "{:,.0f}/s", is_ours=case["of"] in {None, name})
            for name, figures in case["contenders"].items()
        ]
        yield Block(title, bars)


def _memory(result: Mapping[str, Any]) -> Iterator[Block]:
    for title, case in result["cases"].items():
        bars = [_spread(name, each["over_idle_mb"], "{:,.1f} MB") for name, each in case["drains"].items()]
        yield Block(f"{title}: memory over the idle process", bars, case.get("most_mb"))


def _depth(result: Mapping[str, Any]) -> Iterator[Block]:
    yield from _rates(result)
    bars = [_spread(name, each["over_idle_mb"], "{:,.1f} MB") for name, each in result["whole"].items()]
    yield Block("all of it in one run: memory over the idle process", bars)


def _policies(result: Mapping[str, Any]) -> Iterator[Block]:
    yield from _rates(result)
    bars = [_spread(name, each, "{:,.3f} s") for name, each in result["loading"].items()]
    yield Block("loading the policy", bars)


def _scaling(result: Mapping[str, Any]) -> Iterator[Block]:
    bars = [
        Bar(f"{number} at once", each["per_second"], each["least"], each["most"], f"{each['per_second']:,.0f}/s")
        for number, each in result["drains"].items()
    ]
    yield Block(f"drains at once, {result['messages']:,} messages of {result['body_bytes']:,} bytes", bars)


def _cold_start(result: Mapping[str, Any]) -> Iterator[Block]:
    kinds = {"bare": "a bare pika script", "empty": "finds nothing", "messages": f"{result['messages']} messages"}
    bars = [_spread(name, result[f"{kind}_ms"], "{:,.0f} ms", is_ours=kind != "bare") for kind, name in kinds.items()]
    yield Block("a new process, from its start to its end", bars)


def _hot_path(result: Mapping[str, Any]) -> Iterator[Block]:
    bars = [_spread(stage, result[f"{stage}_cpu_microseconds"], "{:,.1f} µs") for stage in ("delay", "return")]
    yield Block("our CPU for a message, with the broker played", bars)


def _dead_store(result: Mapping[str, Any]) -> Iterator[Block]:
    for name in ("claim of 20, and back", "arrival of 100", "list", "groups"):
        bars = [
            Bar(f"{int(rows):,} rows", figures[name], figures[name], figures[name], f"{figures[name]:,.1f} ms")
            for rows, figures in result["rows"].items()
        ]
        yield Block(name, bars)


def _store(result: Mapping[str, Any]) -> Iterator[Block]:
    for step in ("one try: claim, begin, sent, resolved", "whole life"):
        seen = {name: shape["steps"][step]["wal"] for name, shape in result["shapes"].items()}
        yield Block(f"WAL of a message, {step}", [Bar(name, n, n, n, f"{n:,.0f} bytes") for name, n in seen.items()])


def _cost(result: Mapping[str, Any]) -> Iterator[Block]:
    bars = []
    for job, runs in result["functions"].items():
        took = runs["cold"]["seconds"] * 1000
        bars.append(Bar(job, took, took, took, f"{took:,.0f} ms"))
    yield Block("the first run of a new function, with nothing to do", bars)


def _spread(name: str, seen: Mapping[str, float], shown: str, *, is_ours: bool = True) -> Bar:
    return Bar(name, seen["median"], seen["least"], seen["most"], shown.format(seen["median"]), is_ours)


CHARTS: dict[str, Callable[[Mapping[str, Any]], Iterator[Block]]] = {
    "memory": _memory,
    "depth": _depth,
    "policies": _policies,
    "scaling": _scaling,
    "cold_start": _cold_start,
    "hot_path": _hot_path,
    "dead_store": _dead_store,
    "store": _store,
    "cost": _cost,
}
