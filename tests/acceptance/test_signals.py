"""`timeout 60 dlqbatch …` sends its signal to the process and to its group: two of them, and one wish."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from typing import TYPE_CHECKING

import pytest
from program import HANDLER, RETRY_QUEUE, ROOT, Client, Program, eventually
from slow_link import SlowLink

if TYPE_CHECKING:
    from collections.abc import Sequence

MESSAGES = 2_000
TIMEOUT: Sequence[str] = (shutil.which("timeout") or "timeout", "600", sys.executable, HANDLER)


def fill(team: Client) -> None:
    team.make_origin("orders-queue")
    team.expire("orders", "orders.created", (b"%06d" % number + b"." * 500 for number in range(MESSAGES)))
    team.await_depth(RETRY_QUEUE, MESSAGES)


def test_a_run_under_timeout_ends_in_order(program: Program, team: Client, broker_url: str) -> None:
    fill(team)
    with SlowLink(broker_url, pause_after=100_000) as link:
        run = Program({**program.settings, "broker_url": link.url}, TIMEOUT).start("drain", "--json")
        assert link.paused.wait(60)
        run.send_signal(signal.SIGTERM)  # as if its time were over
        assert link.quiet_for(0.3)
        link.go_on()
        out, err = run.communicate(timeout=60)
    told = json.loads(out)
    assert (told["outcome"], told["stopped_by"]) == ("ok", "signal"), err
    assert 0 < told["counts"]["got"] == told["counts"]["delayed"]


@pytest.mark.parametrize("module", ["handler", "dlqbatch"])
def test_a_signal_that_comes_when_all_is_said_does_not_change_the_exit_code(
    program: Program, team: Client, module: str
) -> None:
    """Python itself takes a moment to end, and hears signals until then."""
    fill(team)
    late = "import os, runpy, sys; end = lambda self, kill=os.kill, pid=os.getpid(): kill(pid, 15)"
    late += "; os.last_of_all = type('Last', (), {'__del__': end})()"
    run_it = f"sys.argv[1:] = ['drain', '--json']; runpy.run_module('{module}', run_name='__main__', alter_sys=True)"
    done = Program(program.settings, (sys.executable, "-c", f"{late}; {run_it}")).run(cwd=ROOT)
    assert (done.code, done.told["counts"]["delayed"]) == (0, MESSAGES), done.said


def test_a_scheduler_under_timeout_ends_in_order(program: Program, team: Client) -> None:
    off = {f"schedule_{job}": "off" for job in ("ingest", "lifecycle", "monitor", "retain", "check")}
    given = {**program.settings, **off, "schedule_drain": "1h", "schedule_jitter": "0s", "trigger_depth": "0"}
    running = Program({**given, "health_address": "off"}, TIMEOUT).start("schedule", "--json")
    assert running.stdout is not None
    assert json.loads(running.stdout.readline())["job"] == "drain"
    running.send_signal(signal.SIGTERM)
    assert eventually(lambda: running.poll() is not None, 60)
    _, err = running.communicate(timeout=60)
    assert '"ending' in err
    # GNU's own code for a time that was over would be 124; it is not over, so this is the scheduler's.
    assert running.returncode == 0, err


def test_a_second_signal_that_was_meant_ends_a_run_at_once(program: Program, team: Client, broker_url: str) -> None:
    fill(team)
    with SlowLink(broker_url, pause_after=100_000) as link:
        run = program.but(broker_url=link.url).start("drain", "--json")
        assert link.paused.wait(60)
        run.send_signal(signal.SIGINT)
        assert link.quiet_for(0.3)
        run.send_signal(signal.SIGINT)
        assert run.wait(60) == -signal.SIGINT
