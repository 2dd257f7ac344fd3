"""The page of costs: from what was measured, what serverless.yml deploys and what things cost, its tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from deployed import fixed, functions
from page import sentence, table
from prices import (
    CORE_AT_MB,
    HOURS_A_MONTH,
    NOTHING,
    Bill,
    Prices,
    Run,
    messages_a_month,
    of_container,
    of_function,
    runs_for_a_million,
    share_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from deployed import DeployedFunction

CONTAINER_CORES: Final = 0.25
CONTAINER_MB: Final = 512
RUNS_AN_HOUR: Final = 60


_PASSES: Final = (
    "**A million failed messages.** Each passes `drain` twice for one retry: it is delayed, then returned. The pass "
    "that dead-letters is counted as a delay."
)


class Measured(NamedTuple):
    """Of one function."""

    cold: Run
    empty: Run
    full: Run | None
    returning: Run | None
    """Of drain, its other stage: back to the queues they failed in."""
    peak_mb: float
    metrics: int
    """So many it printed."""

    def full_from_the_start(self) -> Run:
        """As a process of its own, which everything but Lambda starts for each run."""
        assert self.full is not None
        return Run(
            self.full.seconds + self.cold.seconds - self.empty.seconds,
            self.full.cpu_seconds + self.cold.cpu_seconds - self.empty.cpu_seconds,
            messages=self.full.messages,
        )


@dataclass(frozen=True, slots=True)
class Basis:
    """What the figures are of."""

    about: Mapping[str, str]
    rounds: int
    messages: int
    """Of a run, `size` bytes each."""
    size: int
    memory: int | None
    """Of every function; None: each has its own."""
    max_seconds: float
    """The bound of a run that is no function."""
    prices: Prices
    whose_prices: str

    def memory_of(self, one: DeployedFunction) -> int:
        return one.memory_mb if self.memory is None else self.memory

    def bill(self, one: DeployedFunction, run: Run, runs: float) -> Bill:
        return of_function(run, runs, self.memory_of(one), self.prices)


def shown(found: Mapping[str, Measured], basis: Basis) -> list[str]:
    deployed = {one.job: one for one in functions()}
    stages = list(_stages(found, deployed))
    a_million = {name: basis.bill(one, run, runs_for_a_million(run)) for name, one, run, _ in stages}
    drain, of_drain = found["drain"].full, deployed["drain"]
    assert drain is not None
    runs = f"Runs of {basis.messages:,} messages of {basis.size:,} bytes, medians of {basis.rounds} rounds."
    return [
        f"{sentence(basis.about)}. {runs}",
        "",
        _assumptions(basis),
        "",
        "**A million messages through one stage**, as Lambda functions:",
        "",
        *table(
            ("stage", "memory", "peak memory", "a run, billed", "**a million messages**"),
            [_stage(name, one, run, peak, basis, a_million[name]) for name, one, run, peak in stages],
        ),
        "",
        _PASSES,
        "",
        *table(("what becomes of each", "passes through `drain`", "**a million messages**"), _journeys(a_million)),
        "",
        "**A month in which nothing fails**, as serverless.yml starts the functions:",
        "",
        *table(
            ("function", "memory", "runs a month", "warm run", "cold start", "a month, all warm", "all cold"),
            _idle(found, deployed.values(), basis),
        ),
        "",
        *_not_counted(found, deployed),
        "",
        "**Fixed per month**, with the parameter `broker`:",
        "",
        *table(("what", "how many", "each", "**a month**"), _fixed(found, basis.prices)),
        "",
        _container(found["drain"].full_from_the_start(), basis.prices),
        "",
        _an_hour(drain, basis.memory_of(of_drain), basis.max_seconds, of_drain.max_seconds),
    ]


def usd(amount: float) -> str:
    return f"${amount:,.2f}" if amount >= 0.1 or amount == 0 else f"${amount:.4f}"


def _stages(
    found: Mapping[str, Measured], deployed: Mapping[str, DeployedFunction]
) -> Iterator[tuple[str, DeployedFunction, Run, float]]:
    for job, each in found.items():
        if each.full is not None:
            named = job if each.returning is None else f"{job}, delaying"
            yield named, deployed[job], each.full, each.peak_mb
        if each.returning is not None:
            yield f"{job}, returning", deployed[job], each.returning, each.peak_mb


def _stage(name: str, one: DeployedFunction, run: Run, peak_mb: float, basis: Basis, bill: Bill) -> tuple[str, ...]:
    memory = basis.memory_of(one)
    return (name, f"{memory} MB", f"{peak_mb:.0f} MB", f"{run.seconds_on(share_of(memory)):.2f} s", usd(bill.total))


def _journeys(a_million: Mapping[str, Bill]) -> Iterator[tuple[str, ...]]:
    delaying, returning, ingest = (a_million[name] for name in ("drain, delaying", "drain, returning", "ingest"))
    once = delaying + returning
    three_times = once + once + once
    for name, passes, bill in (
        ("retried once, and done", 2, once),
        ("retried three times, and done", 6, three_times),
        ("retried three times, dead, and in the database", 7, three_times + delaying + ingest),
    ):
        yield name, str(passes), usd(bill.total)


def _idle(
    found: Mapping[str, Measured], deployed: Iterable[DeployedFunction], basis: Basis
) -> Iterator[tuple[str, ...]]:
    all_warm, all_cold = NOTHING, NOTHING
    for one in deployed:
        if one.job not in found:
            continue
        each = found[one.job]
        warm, cold = (basis.bill(one, run, one.runs_a_month) for run in (each.empty, each.cold))
        all_warm, all_cold = all_warm + warm, all_cold + cold
        yield (
            *(one.job, f"{basis.memory_of(one)} MB", f"{one.runs_a_month:,}"),
            *(f"{run.seconds * 1000:.0f} ms" for run in (each.empty, each.cold)),
            *(usd(warm.total), usd(cold.total)),
        )
    yield "**together**", "", "", "", "", usd(all_warm.total), usd(all_cold.total)


def _not_counted(found: Mapping[str, Measured], deployed: Mapping[str, DeployedFunction]) -> Iterator[str]:
    for job, one in deployed.items():
        if job not in found:
            off = "is off by default and" if not one.is_on else "is"
            yield f"`{job}` {off} not measured; when it is on, it runs {one.runs_a_month:,} times a month."


def _fixed(found: Mapping[str, Measured], prices: Prices) -> Iterator[tuple[str, ...]]:
    counted = fixed()
    metrics = sum(each.metrics for each in found.values())
    items = (
        ("alarms", counted.alarms - counted.alarms_on_metrics, prices.alarm_month),
        ("alarms on the metrics of runs", counted.alarms_on_metrics, prices.alarm_month),
        ("metrics that the functions above print", metrics, prices.metric_month),
        ("KMS key of the topic", counted.keys, prices.key_month),
        ("secret", counted.secrets, prices.secret_month),
    )
    for name, number, price in items:
        yield name, str(number), usd(price), usd(number * price)
    yield "**together**", "", "", usd(sum(number * price for _, number, price in items))


def _assumptions(basis: Basis) -> str:
    prices = basis.prices
    named = ", ".join(f"{name.replace('_', ' ')} {_price(getattr(prices, name))}" for name in Prices.names())
    return (
        f"{basis.whose_prices}, in US dollars, without a free tier or a discount: {named}. Lambda gives CPU time by "
        f"memory, a whole core at {CORE_AT_MB:,} MB: the measured CPU time is stretched by that, the time spent "
        "waiting is not. Broker and database are on the same machine, without TLS; over a network a run waits longer, "
        "which is billed too."
    )


def _container(drain: Run, prices: Prices) -> str:
    return (
        f"A container of {CONTAINER_CORES} vCPU and {CONTAINER_MB} MB that always runs (`dlqbatch schedule`) costs "
        f"{usd(of_container(CONTAINER_CORES, CONTAINER_MB, prices))} a month of {HOURS_A_MONTH} hours. Its drains, one "
        f"after the other, delay at most {messages_a_month(drain, CONTAINER_CORES) / 1e6:,.0f} million messages in it."
    )


def _an_hour(drain: Run, memory: int, seconds: float, seconds_as_function: float) -> str:
    def at_most(share: float, seconds_of_a_run: float) -> str:
        return f"{drain.messages / drain.seconds_on(share) * seconds_of_a_run * RUNS_AN_HOUR:,.0f}"

    return (
        f"One drain a minute moves {drain.messages * RUNS_AN_HOUR:,} messages an hour with `max-messages` "
        f"{drain.messages:,}. If its runs use all of their time, it moves {at_most(1.0, seconds)} on a whole core "
        f"({seconds:g} s a run), or {at_most(share_of(memory), seconds_as_function)} as a function of {memory} MB "
        f"({seconds_as_function:g} s)."
    )


def _price(dollars: float) -> str:
    return f"${dollars:.10f}".rstrip("0").rstrip(".")
