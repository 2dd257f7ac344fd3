"""The monitor is killed after a receiver has heard of alerts and before that is written down, or the answer is lost."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections import Counter
from typing import TYPE_CHECKING

from dead_rows import add, row

from matrix.scenario import Count, fault
from matrix.store_jobs import DONE, KILLED, OLD, PARTIAL, PATIENCE, Monitoring, body_of

if TYPE_CHECKING:
    from matrix.ground import Ground

STORES = ("postgresql", "sqlite")
GROUPS = 8


class Telling(Monitoring):
    """A backlog, and new groups; by chance it is heard of when they fire, or when they are over."""

    size = GROUPS + 1
    doubled_by_a_crash = size

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self.running: subprocess.Popen[str] | None = None
        self.is_armed = self.ends_well = False
        self.kills_after = ground.random.random() < 0.5
        self.answers = True

    def more_settings(self) -> dict[str, str]:
        return super().more_settings() | {"alert_new_groups": "true"}

    def fill(self) -> None:
        super().fill()
        groups = (row(body=body_of(number), status="manual", fingerprint=f"{number:016}") for number in range(GROUPS))
        add(self.engine, *groups, at=OLD)

    def get_well(self) -> None:
        """What fires now has been told of, and is over."""
        self.run_until_quiet()
        self.tables.do("DELETE FROM dlq_messages")
        self.ends_well = True

    def is_answered(self) -> bool:
        if self.is_armed and not self.kills_after:
            self._strike()
            return self.answers
        return True

    def has_answered(self) -> None:
        if self.is_armed:
            self._strike()

    def _strike(self) -> None:
        self.is_armed = False
        if self.answers:
            until = time.monotonic() + PATIENCE
            while self.running is None:
                assert time.monotonic() < until
                time.sleep(0.001)
            self.running.send_signal(signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.running.wait(30)

    def is_quiet(self) -> bool:
        ended = "OR (resolved_at IS NOT NULL AND resolved_told_at IS NULL)"
        untold = self.tables.number(f"SELECT count(*) FROM dlq_alerts WHERE fired_told_at IS NULL {ended}")
        wanted = "resolved_at IS NOT NULL" if self.ends_well else "true"
        return self.tables.number(f"SELECT count(*) FROM dlq_alerts WHERE {wanted}") >= self.size and not untold

    def count(self) -> tuple[int, int, int]:
        states = ("fired", "resolved") if self.ends_well else ("fired",)
        alerts = self.tables.all("SELECT name, subject FROM dlq_alerts")
        assert len(alerts) == len(set(alerts)) == self.size, alerts
        told = Counter(
            (alert["name"], alert["subject"], alert["state"]) for heard in self.heard for alert in heard["alerts"]
        )
        times = [told[name, subject or "", state] for name, subject in alerts for state in states]
        assert max(times) <= 2, told
        return times.count(0), 0, sum(max(each - 1, 0) for each in times)


def killed(ground: Ground) -> Count:
    """Before the receiver has answered, or when its answer is under way."""
    with Telling(ground) as one:
        if ground.random.random() < 0.5:
            one.get_well()
        one.is_armed = True
        one.running = one.start()
        hits = int(one.end(one.running).code == KILLED)
        return one.found(crashes=hits, hits=hits)


def unanswered(ground: Ground) -> Count:
    """The receiver has taken it; that nobody says so costs a second call."""
    with Telling(ground) as one:
        if ground.random.random() < 0.5:
            one.get_well()
        one.answers, one.kills_after, one.is_armed = False, False, True
        done = one.end(one.start())
        assert done.code in {DONE, PARTIAL}, done.err
        hits = int(not one.is_armed)
        return one.found(crashes=hits, hits=hits)


fault(
    "killed when a receiver has heard of alerts, before that is written down",
    name="monitor-killed-when-told",
    job="monitor",
    kinds=STORES,
    releases=("3.10",),
    runs=20,
)(killed)
fault(
    "a receiver hears of alerts, and its answer is lost",
    name="monitor-unanswered",
    job="monitor",
    kinds=STORES,
    releases=("3.10",),
    runs=10,
)(unanswered)
