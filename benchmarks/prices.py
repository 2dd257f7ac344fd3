"""What a run costs, from the time and memory that were measured. Every price is an assumption; all stand here."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Final

REGION: Final = "us-east-1"
AS_OF: Final = "March 2026"
CORE_AT_MB: Final = 1769
"""Lambda gives CPU time in proportion to memory: so much is one whole core."""
MILLION: Final = 1_000_000
HOURS_A_MONTH: Final = 720
"""Of 30 days."""
LAMBDA_LOG_BYTES: Final = 350
"""What Lambda itself writes into the log for each run: START, END and REPORT."""
_GB: Final = 1024.0
_BYTES_A_GB: Final = 1024.0**3


@dataclass(frozen=True, slots=True)
class Prices:
    """US dollars: list prices without a free tier, a discount or a tax."""

    lambda_gb_second: float = 0.0000166667
    lambda_million_requests: float = 0.20
    logs_gb: float = 0.50
    container_core_hour: float = 0.04048
    container_gb_hour: float = 0.004445
    alarm_month: float = 0.10
    metric_month: float = 0.30
    key_month: float = 1.00
    secret_month: float = 0.40

    def but(self, **given: float | None) -> Prices:
        return replace(self, **{name: value for name, value in given.items() if value is not None})

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))


@dataclass(frozen=True, slots=True)
class Run:
    """One run as it was measured on a whole core."""

    seconds: float
    cpu_seconds: float
    """Of them, those that the process was computing; else it waited for the broker or the database."""
    log_bytes: float = 0.0
    messages: int = 0

    def seconds_on(self, share: float) -> float:
        """With a share of a core what it computes takes longer; what it waits for does not."""
        waiting = max(self.seconds - self.cpu_seconds, 0.0)
        return waiting + self.cpu_seconds / min(share, 1.0)


def share_of(memory_mb: int) -> float:
    return min(memory_mb / CORE_AT_MB, 1.0)


@dataclass(frozen=True, slots=True)
class Bill:
    compute: float
    requests: float
    logs: float

    @property
    def total(self) -> float:
        return self.compute + self.requests + self.logs

    def __add__(self, other: Bill) -> Bill:
        return Bill(self.compute + other.compute, self.requests + other.requests, self.logs + other.logs)


def of_function(run: Run, runs: float, memory_mb: int, prices: Prices) -> Bill:
    """So many such runs as a Lambda function; each is rounded up to the millisecond, as it is billed."""
    billed = math.ceil(round(run.seconds_on(share_of(memory_mb)) * 1000, 6)) / 1000
    return Bill(
        compute=runs * billed * memory_mb / _GB * prices.lambda_gb_second,
        requests=runs * prices.lambda_million_requests / MILLION,
        logs=runs * run.log_bytes / _BYTES_A_GB * prices.logs_gb,
    )


NOTHING: Final = Bill(0.0, 0.0, 0.0)


def runs_for_a_million(run: Run) -> float:
    if run.messages <= 0:
        raise ValueError("a run that moved no message says nothing of what a message costs")
    return MILLION / run.messages


def of_container(cores: float, memory_mb: int, prices: Prices) -> float:
    """A month of a container that always runs, whatever it does."""
    an_hour = cores * prices.container_core_hour + memory_mb / _GB * prices.container_gb_hour
    return an_hour * HOURS_A_MONTH


def messages_a_month(run: Run, cores: float) -> float:
    """What such a container moves at most, one full run after the other."""
    return run.messages / run.seconds_on(cores) * HOURS_A_MONTH * 3600
