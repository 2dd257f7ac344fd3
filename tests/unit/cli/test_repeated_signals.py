"""Two SIGTERM within a second, as GNU's timeout sends them, count as one; a later one ends the process at once."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

RUN = """
import os, signal, sys
from dlqbatch.cli import run as job
stop = job.on_signal()
job.ONE_REQUEST_SECONDS = float(sys.argv[1])
for _ in range(2):
    os.kill(os.getpid(), signal.SIGTERM)
print(stop())
"""
SCHEDULER = """
import os, signal, sys
from queue import SimpleQueue
from dlqbatch.cli import schedule
signals = SimpleQueue()
schedule.ONE_REQUEST_SECONDS = float(sys.argv[1])
signal.signal(signal.SIGTERM, schedule._noting(signals))
for _ in range(2):
    os.kill(os.getpid(), signal.SIGTERM)
sys.exit(signals.qsize())
"""


@pytest.mark.parametrize(
    ("program", "seconds", "code"),
    [(RUN, 60, 0), (RUN, -1, -signal.SIGTERM), (SCHEDULER, 60, 1), (SCHEDULER, -1, 2)],
)
def test_two_signals_within_a_moment_are_one(program: str, seconds: int, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", program, str(seconds)], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
