"""Jobs one after the other, again and again until SIGTERM: as `schedule` runs them, without a process for each run.

Usage: night_jobs.py JOB...
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from dlqbatch import jobs, settings
from dlqbatch.jobs import RunOptions


def main(names: list[str]) -> None:
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    found = settings.load({}, os.environ)
    while not over.is_set():
        for name in names:
            jobs.run(name, found, RunOptions(stopped=over.is_set))
        over.wait(1)


if __name__ == "__main__":
    main(sys.argv[1:])
