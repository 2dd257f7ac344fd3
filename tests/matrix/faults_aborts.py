"""A plan is aborted while an apply sends it, and the abort or the apply is killed at that moment."""

from __future__ import annotations

import contextlib
import signal
import time
from typing import TYPE_CHECKING, Any

from cutting_link import CuttingLink
from lifecycle_rows import ORIGIN
from rawamqp import Peer

from matrix.scenario import Count, fault
from matrix.store_jobs import DONE, KILLED, PARTIAL, PATIENCE, WINDOW, Finished, Replaying

if TYPE_CHECKING:
    import subprocess

    from matrix.ground import Ground

STORES = ("postgresql", "sqlite")
COMMITS = 3
"""An abort makes one that says so, and one or more that let go of what was not sent."""
A_MOMENT = 0.2


class Aborting(Replaying):
    """The plan is given up half way; what it has not sent goes out by plans that come after it."""

    size = 600

    def sends(self) -> subprocess.Popen[str]:
        """An apply that has sent some, by chance one or up to a tenth of all, and goes on for seconds."""
        wanted = self.ground.random.randint(1, self.size // 10)
        process = self.start(None, *self.command(), "--rate", self.ground.random.choice(("30/s", "80/s")))
        until = time.monotonic() + PATIENCE
        while self.depth() < wanted and process.poll() is None:
            assert time.monotonic() < until, "the apply sends nothing"
            time.sleep(0.002)
        return process

    def abort(self, variables: dict[str, str] | None = None, **settings: str) -> subprocess.Popen[str]:
        return self.start(variables, "replay", "abort", self.hash, **settings)

    def aborted(self, process: subprocess.Popen[str]) -> tuple[int, dict[str, Any], int]:
        """Its exit code, what it says, and how many were in the queue when it had said so."""
        out, err = process.communicate(timeout=PATIENCE)
        depth = self.depth()
        self.ground.note(process.returncode, out, err)
        assert "Traceback" not in err, err
        return process.returncode, Finished(process.returncode, out, err).told, depth

    def depth(self) -> int:
        with Peer(self.ground.url) as peer:
            return peer.depth(ORIGIN)

    def state(self) -> str:
        return str(self.tables.all(f"SELECT state FROM dlq_plans WHERE hash = '{self.hash}'")[0][0])

    def is_quiet(self) -> bool:
        return self.unsent() == 0

    def run_until_quiet(self) -> None:
        """As people do: abort once more what was cut, then lifecycles, and a plan of what there is now."""
        if self.state() == "applying":
            code, *_ = self.aborted(self.abort())
            assert code in {DONE, PARTIAL}, code
        until = time.monotonic() + PATIENCE
        while not self.is_quiet():
            assert time.monotonic() < until, f"not quiet within {PATIENCE} s"
            self.ease()
            self.end(self.start(None, "lifecycle"))
            planned = self.program().run("replay", "plan", "--all", "--json")
            assert planned.code == DONE, planned.said
            if planned.told["size"]:
                self.hash = planned.told["hash"]
                self.end(self.start())

    def ease(self) -> None:
        self.tables.do(
            "UPDATE dlq_messages SET lease_until = '2020-01-01T00:00:00.000000+00:00' WHERE lease_until IS NOT NULL"
        )

    def count(self) -> tuple[int, int, int]:
        at_rest = "plan_id IS NOT NULL AND status <> 'processing'"
        assert self.tables.number(f"SELECT count(*) FROM dlq_messages WHERE {at_rest}") == 0
        return super(Replaying, self).count()


def aborted(ground: Ground) -> Count:
    """When it has returned nothing more arrives, and it has said how many had."""
    with Aborting(ground) as one:
        apply = one.sends()
        code, told, depth = one.aborted(one.abort())
        done = one.end(apply)
        hits = int(done.code == PARTIAL and told.get("state") == "aborted")
        if hits:
            assert code == DONE, told
            assert told["sent"] == depth == one.depth(), (told["sent"], depth, one.depth())
            assert told["held"] == 0, told
        return one.found(crashes=0, hits=hits)


def abort_killed(ground: Ground) -> Count:
    """Before or after one of its commits: the apply stops, or goes on until the next abort."""
    number, is_heard = ground.random.randint(1, COMMITS), ground.random.random() < 0.5
    ground.note(f"killed {'after' if is_heard else 'before'} commit {number}")
    with Aborting(ground) as one:
        apply = one.sends()
        if one.tables.is_sqlite:
            process = one.abort({"STRANGE_COMMIT": f"{number}:{'after' if is_heard else 'before'}"})
            process.communicate(timeout=PATIENCE)
        else:
            running: list[subprocess.Popen[str]] = []

            def kill() -> None:
                running[0].send_signal(signal.SIGKILL)
                running[0].wait(30)

            with CuttingLink(one.database, number, is_heard=is_heard, act=kill) as link:
                running.append(one.abort(database_url=link.url))
                process = running[0]
                process.communicate(timeout=PATIENCE)
        # Stopped or not, it has settled all that it sent.
        assert one.end(apply).code in {DONE, PARTIAL}
        return one.found(crashes=0, hits=int(process.returncode == KILLED))


def apply_killed(ground: Ground) -> Count:
    """As the abort is committed, or a moment later: the abort says how many it knows nothing of."""
    with Aborting(ground) as one:
        apply = one.sends()
        moment = ground.random.uniform(0, A_MOMENT)

        def kill() -> None:
            time.sleep(moment * ground.random.choice((0, 1)))
            apply.send_signal(signal.SIGKILL)
            apply.wait(30)

        with contextlib.ExitStack() as stack:
            if one.tables.is_sqlite:
                process = one.abort()
                time.sleep(moment * 3)
                kill()
            else:
                link = stack.enter_context(CuttingLink(one.database, 1, act=kill, cuts=False))
                process = one.abort(database_url=link.url)
            code, told, depth = one.aborted(process)
        hits = int(apply.poll() == KILLED)
        one.end(apply)
        if hits and told.get("state") == "aborted":
            assert code == (PARTIAL if told["held"] else DONE), told
            assert told["sent"] <= depth <= told["sent"] + told["held"], (told["sent"], depth, told["held"])
            assert one.depth() == depth
        count = one.found(crashes=hits, hits=hits)
        assert not hits or count.allowed == WINDOW
        return count


for _make, _title, _runs in (
    (aborted, "plan aborted while an apply sends it", 10),
    (abort_killed, "plan aborted while an apply sends it, the abort killed before or after any commit", 20),
    (apply_killed, "plan aborted while an apply sends it, the apply killed at that moment", 20),
):
    fault(_title, name=f"replay-{_make.__name__.replace('_', '-')}", job="replay", kinds=STORES, runs=_runs)(_make)
