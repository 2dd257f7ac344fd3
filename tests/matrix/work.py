"""A job with something to do: messages it is to take or send, the command, and the count when all is quiet.

Whatever the job, a fault fills it, starts a run in a process of its own, breaks something, and asks for the count.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from program import HANDLER, environment
from rawamqp import AmqpError, Peer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from frame_link import FrameLink

    from matrix.ground import Ground

DONE, FAILED, USAGE, PARTIAL, UNREACHABLE = range(5)
UNDER_WAY = 512
"""Messages that a run has under way at once, as docs/design.md says it.

Acknowledgements that the broker has not handled come on top where several queues are read: it handles each queue's
channel by itself, and one that lags behind does not hold the others up. So a crash may double as many of each queue.
"""
ENDS_WITHIN = 120.0
"""Seconds: a run's own bounds are far below; what takes longer has none."""
QUIET_WITHIN = 120.0
"""Seconds in which a broker gives back what a run held, and runs finish."""


class Ended(NamedTuple):
    """How a run ended, and what it said."""

    code: int
    out: str
    err: str
    report: dict[str, Any] | None


@dataclass
class Run:
    process: subprocess.Popen[str]
    ground: Ground

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    @property
    def is_over(self) -> bool:
        return self.process.poll() is not None

    def end(self, within: float = ENDS_WITHIN, codes: tuple[int, ...] = (DONE, PARTIAL, UNREACHABLE)) -> Ended:
        """Wait until it has ended by itself; what it reports adds up."""
        try:
            out, err = self.process.communicate(timeout=within)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
            raise AssertionError(f"a run did not end within {within:g} s: {out + err}") from None
        code = self.process.returncode
        self.ground.note(f"exit {code}: {out.strip()} {err.strip()[-2000:]}")
        report = None
        if code >= 0:
            assert code in codes, f"exit code {code}: {out + err}"
            assert "Traceback" not in err, err
            report = json.loads(out) if out.strip() else {}
            if "counts" in report:
                _check(report)
        return Ended(code, out, err, report)


def _check(report: dict[str, Any]) -> None:
    counts = dict(report["counts"])
    got = counts.pop("got")
    assert got == sum(counts.values()), f"a report does not add up: {report}"


def tells_why(ended: Ended) -> bool:
    """That it was the broker, or at least what is not done."""
    return "the broker" in ended.out + ended.err or "not-confirmed" in ended.out


class Work(Protocol):
    """What a job is to do in one round."""

    ground: Ground

    @property
    def job(self) -> str: ...

    @property
    def sources(self) -> Sequence[str]:
        """What is read."""

    @property
    def queues(self) -> Sequence[str]:
        """All that were declared."""

    @property
    def messages(self) -> int:
        """All that there are to be at the end."""

    def fill(self, number: int) -> None: ...
    def command(self) -> list[str]: ...
    def settings(self, broker_url: str) -> dict[str, str]: ...

    def finished(self, one: Peer) -> int:
        """How many are where they belong, at the moment: it grows while a run is at it."""

    def may_double(self, link: FrameLink | None) -> int:
        """How many copies a crash may leave; asked when the run is dead, and before anything is mended."""

    def settle(self, within: float = QUIET_WITHIN) -> tuple[int, int, int]:
        """Run until it is quiet, or nothing more comes in this time; what was lost, changed, doubled."""


def under_way(work: Work, link: FrameLink | None) -> int:
    """What was published and not acknowledged, by the link's count.

    A quorum queue forgets the acknowledgements that it has put aside when the channel goes, whoever has read them.
    """
    most = UNDER_WAY * len(work.sources)
    if link is None:
        return most
    return link.under_way if work.ground.kind == "classic" else min(link.passed["publish"], most)


def start(work: Work, broker_url: str, *arguments: str, **settings: str) -> Run:
    """A run in a process of its own; `broker_url` may be a link."""
    given = work.settings(broker_url) | settings
    process = subprocess.Popen(
        [sys.executable, HANDLER, *work.command(), "--json", *arguments],
        env=environment(**given),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    work.ground.started.append(process)
    return Run(process, work.ground)


def wait(condition: Callable[[], object], what: str, seconds: float = QUIET_WITHIN) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.005)


def retried(condition: Callable[[], object], seconds: float) -> bool:
    """Whether it came true in this time; what is missing then is for a count to say."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def peer(ground: Ground) -> Peer:
    """A connection to the broker, once it lets one in."""
    deadline = time.monotonic() + QUIET_WITHIN
    while time.monotonic() < deadline:
        with contextlib.suppress(AmqpError, OSError):
            return Peer(ground.url)
        time.sleep(0.05)
    return Peer(ground.url)
