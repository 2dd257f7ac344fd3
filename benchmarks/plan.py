"""What `scripts/bench all` runs, in which order, and how long each may take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Entry:
    """One benchmark with its options; the name is that of its results."""

    name: str
    command: tuple[str, ...]
    quick: tuple[str, ...]
    """Options besides, for a short look at whether it works."""
    limit: float
    """Seconds; whoever takes longer is ended."""
    turns: float | None = None
    """Seconds for its rounds: no round begins that would probably end later."""
    if_time_is_left: bool = False
    """It is left out if there is not at least half of its limit left."""

    def arguments(self, *, quick: bool) -> tuple[str, ...]:
        return (*self.command, *self.quick) if quick else self.command


_DRAIN_QUICK: Final = ("--rounds", "2", "--messages", "2000", "--naive-messages", "200")
_LIMIT_AND_DRAIN: Final = ("drain", "--without", "naive,shovel,consuming")
_MIB: Final = 1 << 20
PLAN: Final = (
    Entry("hot_path", ("hot_path",), ("--rounds", "3", "--messages", "2000"), 120),
    Entry("cold_start", ("cold_start",), ("--rounds", "3", "--import-rounds", "1"), 150),
    Entry("drain", ("drain",), _DRAIN_QUICK, 300, 200),
    Entry("drain-quorum", ("drain", "--queue-type", "quorum"), _DRAIN_QUICK, 240, 120),
    Entry("drain-4.3", ("drain", "--release", "4.3"), _DRAIN_QUICK, 240, 130),
    Entry("drain-quorum-4.3", ("drain", "--release", "4.3", "--queue-type", "quorum"), _DRAIN_QUICK, 200, 80),
    Entry(
        "sizes",
        (*_LIMIT_AND_DRAIN, "--sizes", f"100,1024,10240,{_MIB}", "--bytes", str(512 * _MIB)),
        ("--rounds", "2", "--messages", "2000", "--bytes", str(20 * _MIB)),
        600,
        460,
    ),
    Entry("memory", ("memory",), ("--rounds", "1", "--bytes", str(64 * _MIB)), 240),
    Entry("policies", ("policies",), ("--rounds", "2", "--messages", "1000", "--rows", "10,1000,20000"), 400, 290),
    Entry("scaling", ("scaling", "--seconds", "150"), ("--rounds", "2", "--messages", "2000"), 300),
    Entry(
        "jobs",
        ("jobs", "--stored", "10000,1000000"),
        ("--rounds", "1", "--messages", "500", "--stored", "1000,20000"),
        1200,
        800,
    ),
    Entry("replay_rate", ("replay_rate",), ("--rounds", "1", "--seconds-each", "2"), 240, 100),
    Entry("depth", ("depth",), ("--rounds", "2", "--messages", "1000", "--depths", "2000,5000,10000"), 660, 480),
    Entry(
        "cost",
        ("cost", "--rounds", "2", "--messages", "2000"),
        ("--rounds", "1", "--messages", "100"),
        120,
        if_time_is_left=True,
    ),
    Entry("dead_store", ("dead_store",), ("--rounds", "3", "--rows", "20000"), 300, if_time_is_left=True),
    Entry("store", ("store",), ("--messages", "300"), 120, if_time_is_left=True),
    Entry(
        "jobs-100000",
        ("jobs", "--messages", "100000", "--only", "check,replay"),
        ("--rounds", "1", "--messages", "1000"),
        900,
        600,
        if_time_is_left=True,
    ),
)
