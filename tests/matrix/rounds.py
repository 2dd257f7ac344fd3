"""One round, or many; what they found."""

from __future__ import annotations

import json
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from matrix.ground import new_ground
from matrix.scenario import Count, faults

if TYPE_CHECKING:
    from pathlib import Path

    from matrix.ground import Servers
    from matrix.scenario import Fault

_LATE = 10
"""Rounds in a row that come too late, after which there is something wrong with the fault."""


@dataclass
class Found:
    """All rounds of one fault on one kind of queue or store and one release."""

    fault: str
    kind: str
    release: str
    runs: int = 0
    hits: int = 0
    messages: int = 0
    lost: int = 0
    changed: int = 0
    doubled: int = 0
    allowed: int | None = 0
    gone: int = 0
    failed: int = 0
    seconds: float = 0.0
    seed: str = ""
    """With --seed and this text the same rounds are made again."""
    failures: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not self.failed and self.runs > 0 and self.hits > 0

    def add(self, count: Count) -> None:
        self.hits += count.hits
        self.messages += count.messages
        self.lost += count.lost
        self.changed += count.changed
        self.doubled += count.doubled
        self.gone += count.gone
        self.allowed = None if self.allowed is None or count.allowed is None else self.allowed + count.allowed


def once(name: str, servers: Servers, kind: str, seed: str) -> Count:
    """One round in a test: it fails as the test does. One that came too late has no hits, and proves nothing."""
    chosen = faults()[name]
    assert kind in chosen.kinds
    sys.stdout.write(f"seed {seed}\n")  # pytest shows it when the test fails
    with new_ground(servers, kind, seed, breaks_node=chosen.breaks_node) as ground:
        try:
            count = chosen.make(ground)
        finally:
            for note in ground.notes:
                sys.stdout.write(f"{note}\n")
    sys.stdout.write(f"{count}\n")
    assert count.is_good, count
    return count


def many(chosen: Fault, servers: Servers, kind: str, seed: str, runs: int, seconds: float, failures: Path) -> Found:
    """At least one round that came in time, and no new one after so many seconds; a failed one is written down."""
    found = Found(chosen.name, kind, servers.release, seed=seed)
    began = time.monotonic()
    while (
        found.runs == 0
        or (found.hits == 0 and found.failed == 0)
        or (found.runs < runs and time.monotonic() - began < seconds)
    ):
        # Of fault, kind and number, so that --only repeats a round without those before it.
        one = f"{seed}/{chosen.name}/{kind}/{found.runs}"
        notes: list[str] = []
        found.runs += 1
        try:
            with new_ground(servers, kind, one, breaks_node=chosen.breaks_node) as ground:
                notes = ground.notes
                count = chosen.make(ground)
            found.add(count)
            if not count.is_good:
                _write_down(found, one, f"{count}", notes, failures)
        except Exception:  # noqa: BLE001  (whatever went wrong is a finding, and the next round is to be made)
            _write_down(found, one, traceback.format_exc(), notes, failures)
            servers.replace()
        if found.runs >= _LATE and not found.hits:
            _write_down(found, one, "the fault never struck", [], failures)
            break
    found.seconds = round(time.monotonic() - began, 1)
    return found


def _write_down(found: Found, seed: str, why: str, notes: list[str], failures: Path) -> None:
    found.failed += 1
    failures.mkdir(parents=True, exist_ok=True)
    path = failures / f"{found.release}-{seed.replace('/', '-')}.json"
    failure = asdict(found) | {"seed": seed, "why": why, "notes": notes}
    del failure["failures"]
    path.write_text(json.dumps(failure, indent=1) + "\n")
    found.failures.append({"seed": seed, "why": why.strip().splitlines()[-1]})
