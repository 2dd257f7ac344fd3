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
SECONDS_BETWEEN: Final = 60.0


_PASSES: Final = (
    "**A million failed messages.** Each passes `drain` twice for one retry: it is delayed, then returned. With three "
    "retries that is up to seven times; the last, which dead-letters, is counted as a delay."
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
        *_assumptions(basis),
        "",
        "**A million messages through one stage**, as Lambda functions:",
        "",
        *table(
            (
                *("stage", "memory", "a run, on a whole core", "CPU of it", "billed at this memory", "peak memory"),
                *("compute", "requests", "logs", "**a million messages**"),
            ),
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
            (
                *("function", "memory", "runs a month", "warm run", "cold start", "bytes of log a run"),
                *("a month, all warm", "all cold", "logs of it"),
            ),
            _idle(found, deployed.values(), basis),
        ),
        "",
        *_not_counted(found, deployed),
        "",
        "**Fixed per month**, whatever happens, with `broker` given:",
        "",
        *table(("what", "how many", "each", "**a month**"), _fixed(found, basis.prices)),
        "",
        "`metricsNamespace=off` takes away the metrics, and with them the alarms on partial runs.",
        "",
        _container(found["drain"].full_from_the_start(), basis.prices),
        "",
        "**What to turn first**, and how far it goes, messages an hour of one drain:",
        "",
        *table(
            ("setting", "on a whole core", f"as a function of {basis.memory_of(of_drain)} MB"),
            ladder(drain, basis.memory_of(of_drain), basis.max_seconds, of_drain.max_seconds),
        ),
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
    times = (run.seconds, run.cpu_seconds, run.seconds_on(share_of(memory)))
    dollars = (bill.compute, bill.requests, bill.logs, bill.total)
    return (name, f"{memory} MB", *(f"{time:.2f} s" for time in times), f"{peak_mb:.0f} MB", *map(usd, dollars))


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
            *(f"{run.seconds * 1000:.0f} ms, {run.cpu_seconds * 1000:.0f} ms CPU" for run in (each.empty, each.cold)),
            *(f"{each.empty.log_bytes:,.0f}", usd(warm.total), usd(cold.total), usd(warm.logs)),
        )
    yield "**together**", "", "", "", "", "", usd(all_warm.total), usd(all_cold.total), usd(all_warm.logs)


def _not_counted(found: Mapping[str, Measured], deployed: Mapping[str, DeployedFunction]) -> Iterator[str]:
    for job, one in deployed.items():
        if job not in found:
            off = "is off by default, and" if not one.is_on else ""
            yield f"`{job}` {off} not measured here: when it is on, it runs {one.runs_a_month:,} times a month."


def _fixed(found: Mapping[str, Measured], prices: Prices) -> Iterator[tuple[str, ...]]:
    counted = fixed()
    metrics = sum(each.metrics for each in found.values())
    items = (
        ("alarms", counted.alarms - counted.alarms_on_metrics, prices.alarm_month),
        ("alarms on partial runs", counted.alarms_on_metrics, prices.alarm_month),
        ("metrics that the functions above print", metrics, prices.metric_month),
        ("KMS key of the topic", counted.keys, prices.key_month),
        ("secret", counted.secrets, prices.secret_month),
    )
    for name, number, price in items:
        yield name, str(number), usd(price), usd(number * price)
    yield "**together**", "", "", usd(sum(number * price for _, number, price in items))


def _assumptions(basis: Basis) -> Iterator[str]:
    prices = basis.prices
    named = ", ".join(f"{name.replace('_', ' ')} {_price(getattr(prices, name))}" for name in Prices.names())
    yield "Assumed, and no more than that:"
    yield ""
    yield (
        f"- {basis.whose_prices}, in US dollars, without a free tier or a discount: {named}. With those of another "
        "region: `scripts/bench cost --region eu-central-1 --logs-gb 0.63`, and so on; there is an option for each."
    )
    yield (
        f"- Lambda gives a function CPU time by its memory, a whole core at {CORE_AT_MB:,} MB. What was measured as "
        "CPU time is stretched by that, what was spent waiting is not. A cold start is stretched like the rest, though "
        "Lambda may give it more."
    )
    yield (
        "- Broker and database are on the same machine, without TLS: over a network a run waits longer, which is "
        "billed too."
    )


def _container(drain: Run, prices: Prices) -> str:
    return (
        f"A container of {CONTAINER_CORES} vCPU and {CONTAINER_MB} MB that always runs (`dlqbatch schedule`) costs "
        f"{usd(of_container(CONTAINER_CORES, CONTAINER_MB, prices))} a month of {HOURS_A_MONTH} hours, whatever it "
        f"does. One drain after the other, each a new process of {drain.messages:,} messages, delays at most "
        f"{messages_a_month(drain, CONTAINER_CORES) / 1e6:,.0f} million messages in it."
    )


def ladder(drain: Run, memory: int, seconds: float, seconds_as_function: float) -> Iterator[tuple[str, str, str]]:
    """From what is set to what the machine gives; each bounded by what a run can do in its time."""

    def an_hour(per_run: float | None, every: float, share: float, most_seconds: float) -> str:
        most = drain.messages / drain.seconds_on(share) * min(every, most_seconds)
        return f"{(most if per_run is None else min(per_run, most)) * 3600 / every:,.0f}"

    def both(per_run: float | None, every: float) -> tuple[str, str]:
        of_function_ = an_hour(per_run, every, share_of(memory), seconds_as_function)
        return an_hour(per_run, every, 1.0, seconds), of_function_ if every >= SECONDS_BETWEEN else ""

    yield f"`max-messages` {drain.messages:,}, a run every 60 s", *both(drain.messages, SECONDS_BETWEEN)
    its_time = f"{seconds:g} s (as a function {seconds_as_function:g} s)"
    yield f"`max-messages` so high that a run takes its {its_time}, every 60 s", *both(None, SECONDS_BETWEEN)
    yield (
        f"`max-messages` {drain.messages:,}, a run every 10 s (`schedule-drain`; no schedule of AWS is that fine)",
        *both(drain.messages, 10.0),
    )


def _price(dollars: float) -> str:
    return f"${dollars:.10f}".rstrip("0").rstrip(".")
