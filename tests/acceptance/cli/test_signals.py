"""`timeout 60 dlqbatch …` sends its signal to the process and to its group: two of them, and one wish."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from program import HANDLER, HANGS_AFTER, RETRY_QUEUE, ROOT, Client, Program, environment, eventually
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
        assert link.paused.wait(HANGS_AFTER)
        run.send_signal(signal.SIGTERM)  # as if its time were over
        assert link.quiet_for(0.3)
        link.go_on()
        out, err = run.communicate(timeout=HANGS_AFTER)
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
    off = {f"schedule_{job}": "off" for job in ("ingest", "lifecycle", "replay", "monitor", "retain", "check")}
    given = {**program.settings, **off, "schedule_drain": "1h", "schedule_jitter": "0s", "trigger_depth": "0"}
    running = Program({**given, "health_address": "off"}, TIMEOUT).start("schedule", "--json")
    assert running.stdout is not None
    assert json.loads(running.stdout.readline())["job"] == "drain"
    running.send_signal(signal.SIGTERM)
    assert eventually(lambda: running.poll() is not None)
    _, err = running.communicate(timeout=HANGS_AFTER)
    assert '"ending' in err
    # GNU's own code for a time that was over would be 124; it is not over, so this is the scheduler's.
    assert running.returncode == 0, err


def test_a_second_signal_that_was_meant_ends_a_run_at_once(program: Program, team: Client, broker_url: str) -> None:
    fill(team)
    with SlowLink(broker_url, pause_after=100_000) as link:
        run = program.but(broker_url=link.url).start("drain", "--json")
        assert link.paused.wait(HANGS_AFTER)
        run.send_signal(signal.SIGINT)
        assert link.quiet_for(0.3)
        run.send_signal(signal.SIGINT)
        assert run.wait(HANGS_AFTER) == -signal.SIGINT


HELD_WHILE_IT_LOADS = """
import sys

class Held:
    def find_spec(self, name, path=None, target=None):
        if name == "dlqbatch.settings":
            open({fifo!r}).read()

sys.meta_path.insert(0, Held())
"""


@pytest.mark.parametrize("start", [(HANDLER, "drain"), ("-m", "dlqbatch", "ingest"), (HANDLER, "schedule")], ids=str)
def test_a_signal_during_the_start_ends_process_1_of_a_container(tmp_path: Path, start: tuple[str, ...]) -> None:
    """The system gives process 1 no signal that it has no handler for, so that there is no default action."""
    fifo = tmp_path / "held"
    os.mkfifo(fifo)
    (tmp_path / "sitecustomize.py").write_text(HELD_WHILE_IT_LOADS.format(fifo=str(fifo)))
    variables = environment() | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", sys.executable, *start]
    with subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
        held = _opened(fifo)
        (child,) = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGTERM)
        try:
            _, err = run.communicate(timeout=HANGS_AFTER)
        finally:
            os.close(held)
            run.kill()
    assert (run.returncode, err) == (128 + signal.SIGTERM, "")


def _opened(fifo: Path) -> int:
    """Open for writing once the other side reads."""
    found: list[int] = []

    def is_read() -> bool:
        try:
            found.append(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:
            return False
        return True

    assert eventually(is_read)
    return found[0]
