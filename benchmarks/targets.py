"""What is aimed at, beside what was seen; a target that is missed says so, and one that was not measured too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

LIMIT, SHOVEL, NAIVE, DRAIN = "limit", "shovel plugin", "naive loop", "dlqbatch drain"
BOUNDED = "limit, in as much memory"
RELEASES: Final = {"": "the installed RabbitMQ", "-4.3": "RabbitMQ 4.3"}
_FOUR: Final = "≥ 0.9 of the limit, 1 of the shovel, 10 of the naive loop; ≤ 25 µs"
_TWO: Final = "≥ 1 of the shovel, 20 of the naive loop"
_OF_JOBS: Final = {"ingest": 0.6, "lifecycle": 0.4, "replay": 0.4, "check": 0.5}
"""Of the drain's rate."""
FLAT_MB: Final = 5.0
"""Memory that may differ between depths and still counts as flat."""
ONE_KIB: Final = 1024


@dataclass(frozen=True, slots=True)
class Target:
    what: str
    wanted: str
    seen: str
    is_met: bool | None
    """None if it was not measured."""


def targets(results: Mapping[str, Mapping[str, Any]]) -> list[Target]:
    """In the order of the plan, whatever is there of the results."""
    found: list[Target] = []
    for check, needed, names in CHECKS:
        result = results.get(needed)
        if result is None or "failed" in result:
            reason = "" if result is None else f": {result['failed']}"
            found += [Target(what, wanted, f"not measured{reason}", None) for what, wanted in names]
        else:
            found += check(result)
    return found


def _at_least(what: str, wanted: float, value: float, unit: str = "", note: str = "") -> Target:
    return Target(what, f"≥ {wanted:g}{unit}", f"{value:.2f}{unit}{note}", value >= wanted)


def _at_most(what: str, wanted: float, value: float, unit: str = "", note: str = "") -> Target:
    return Target(what, f"≤ {wanted:g}{unit}", f"{value:.2f}{unit}{note}", value <= wanted)


def _ratio(contenders: Mapping[str, Any], other: str) -> float:
    return float(contenders[other]["ratio"]["median"])


def _only_case(result: Mapping[str, Any]) -> Any:
    return next(iter(result["cases"].values()))["contenders"]


def _classic(result: Mapping[str, Any]) -> Iterator[Target]:
    seen, where = _only_case(result), f"drain, classic, {result['machine']['rabbitmq']}"
    what = f"{where}: to"
    for other, wanted, stretch in ((LIMIT, 0.9, 0.97), (SHOVEL, 1.0, 1.1)):
        ratio = _ratio(seen, other)
        yield _at_least(f"{what} the {other}", wanted, ratio)
        yield _at_least(f"{what} the {other}, stretched", stretch, ratio)
    yield _at_least(f"{what} the {NAIVE}", 10, _ratio(seen, NAIVE))
    yield _at_most(f"{where}: our CPU", 25, seen[DRAIN]["cpu_microseconds"]["median"], " µs")


def _quorum(result: Mapping[str, Any]) -> Iterator[Target]:
    seen = _only_case(result)
    what = f"drain, quorum, {result['machine']['rabbitmq']}: to"
    yield _at_least(f"{what} the {NAIVE}", 20, _ratio(seen, NAIVE))
    yield _at_least(f"{what} the {SHOVEL}", 1.0, _ratio(seen, SHOVEL))


def _sizes(result: Mapping[str, Any]) -> Iterator[Target]:
    ratios = {case["body_bytes"]: _ratio(case["contenders"], LIMIT) for case in result["cases"].values()}
    plain = ratios.get(ONE_KIB, 0.0)
    bounded = {
        case["body_bytes"]: _ratio(case["contenders"], BOUNDED)
        for case in result["cases"].values()
        if BOUNDED in case["contenders"]
    }
    for size, ratio in ratios.items():
        if size != ONE_KIB:
            note = f" ({ratio:.2f}; {plain:.2f} with 1 KiB"
            note += f"; {bounded[size]:.2f} in as much memory)" if size in bounded else ")"
            yield _at_most(f"{size:,} B: ratio to the limit differs by", 0.1, abs(ratio - plain), "", note)


def _memory(result: Mapping[str, Any]) -> Iterator[Target]:
    for title, case in result["cases"].items():
        if "most_mb" in case:
            most = max(each["over_idle_mb"]["most"] for each in case["drains"].values())
            what = f"{title}: memory over the idle process"
            yield _at_most(what, round(case["most_mb"], 1), most, " MB", "")


def _depth(result: Mapping[str, Any]) -> Iterator[Target]:
    ratios = {case["depth"]: _ratio(case["contenders"], LIMIT) for case in result["cases"].values()}
    shown = ", ".join(f"{ratio:.2f} at {depth:,}" for depth, ratio in ratios.items())
    differ = max(ratios.values()) - min(ratios.values())
    yield _at_most("any depth: ratio to the limit differs by", 0.1, differ, "", f" ({shown})")
    memory = {title: each["over_idle_mb"]["median"] for title, each in result["whole"].items()}
    shown = ", ".join(f"{megabytes:.1f} of {title}" for title, megabytes in memory.items())
    differ = max(memory.values()) - min(memory.values())
    yield _at_most("any depth: memory differs by", FLAT_MB, differ, " MB", f" ({shown})")


def _jobs(result: Mapping[str, Any]) -> Iterator[Target]:
    seen = _only_case(result)
    for job, wanted in _OF_JOBS.items():
        if job in seen:
            yield _at_least(f"{job}: to the drain", wanted, seen[job]["of_the_drain"]["median"])
    rates = {name: figures["per_second"]["median"] for name, figures in seen.items()}
    plain = [name for name in rates if name.partition(",")[0] not in {"drain", *_OF_JOBS}]
    for name in plain:
        yield _at_least(f"ingest: to the {name}", 6, rates["ingest"] / rates[name])
    if not plain:
        yield Target("ingest: to a row-and-commit loop", "≥ 6", "not measured", None)
    for name, rate in rates.items():
        if name.startswith("lifecycle, "):
            yield _at_least(f"{name}: to that with few", 0.8, rate / rates["lifecycle"])


def _jobs_of_100_000(result: Mapping[str, Any]) -> Iterator[Target]:
    (title, case), *_ = result["cases"].items()
    seen = case["contenders"]
    for job in ("replay", "check"):
        what = f"{job} of {title.partition(' of ')[0]}: to the drain"
        yield _at_least(what, _OF_JOBS[job], seen[job]["of_the_drain"]["median"])


def _replay_rate(result: Mapping[str, Any]) -> Iterator[Target]:
    for case in result["cases"].values():
        rate = case["rate"]
        off = abs(case["contenders"]["replay"]["per_second"]["median"] / rate - 1) * 100
        yield _at_most(f"replay --rate {rate}/s: differs by", 3, off, " %")


def _scaling(result: Mapping[str, Any]) -> Iterator[Target]:
    rates = {number: each["per_second"] for number, each in result["drains"].items()}
    if "2" in rates:
        yield _at_least("2 drains at once: to one", 0.9, rates["2"] / rates["1"])
    if "4" in rates:
        seen = f"{rates['4'] / rates['1']:.2f}"
        yield Target("4 drains at once: to one; no message lost or doubled", "reported", seen, True)


def _cold_start(result: Mapping[str, Any]) -> Iterator[Target]:
    for kind, what, wanted in (("empty", "with nothing to do", 2.5), ("messages", "with a few messages", 4.5)):
        ratio = result[f"{kind}_to_bare"]["median"]
        yield _at_most(f"cold start {what}: to a bare script", wanted, ratio)


def _policies(result: Mapping[str, Any]) -> Iterator[Target]:
    rates = [each["per_second"]["median"] for each in _only_case(result).values()]
    differ = (1 - min(rates) / max(rates)) * 100
    yield _at_most(f"{', '.join(_only_case(result))}: rates differ by", 10, differ, " %")
    for title, took in result["loading"].items():
        if title.startswith(_most_events(result)):
            yield _at_most(f"loading {title}", 1, took["median"], " s")


def _most_events(result: Mapping[str, Any]) -> str:
    return str(next(iter(result["cases"].values()))["of"])


_Names = list[tuple[str, str]]
CHECKS: Final[list[tuple[Callable[[Mapping[str, Any]], Iterator[Target]], str, _Names]]] = [
    *((_classic, f"drain{of}", [(f"drain, classic, {where}", _FOUR)]) for of, where in RELEASES.items()),
    *((_quorum, f"drain-quorum{of}", [(f"drain, quorum, {where}", _TWO)]) for of, where in RELEASES.items()),
    (_sizes, "sizes", [("100 B to 1 MiB: ratio to the limit differs by", "≤ 0.1")]),
    (_memory, "memory", [("large bodies: memory over the idle process", "≤ 40 MB and five bodies")]),
    (_depth, "depth", [("any depth", "ratio ≤ 0.1 apart, memory flat")]),
    (_jobs, "jobs", [(f"{job}: to the drain", f"≥ {wanted:g}") for job, wanted in _OF_JOBS.items()]),
    (_jobs_of_100_000, "jobs-100000", [("replay and check of 100,000", "≥ 0.4 and 0.5")]),
    (_replay_rate, "replay_rate", [("replay --rate: differs by", "≤ 3 %")]),
    (_scaling, "scaling", [("2 drains at once: to one", "≥ 0.9")]),
    (_cold_start, "cold_start", [("cold start: to a bare script", "≤ 2.5 and 4.5")]),
    (_policies, "policies", [("few and many events: rates differ by", "≤ 10 %")]),
]
"""With the result that each needs, and what to call its targets when that is not there."""
