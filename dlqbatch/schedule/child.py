"""Started by the scheduler in place of `python -m dlqbatch`: one run, which ends in order when its scheduler ends.

The scheduler alone holds the other end of stdin. When it ends it closes that end, and when it dies, the system closes
it: then there is nothing left to read, and the run gets SIGTERM. This file imports nothing of dlqbatch, and is run by
its path.
"""

import os
import runpy
import signal
import sys
import threading
from pathlib import Path

_HOME = str(Path(__file__).resolve().parents[2])


def _end_with_the_scheduler() -> None:
    while os.read(0, 1):
        pass
    # systemd signals every process of a service. A second signal would end the run at once, with what it holds not
    # settled.
    handler = signal.getsignal(signal.SIGTERM)
    stop = getattr(handler, "__self__", None)
    if handler is not signal.SIG_DFL and not (callable(stop) and stop()):
        os.kill(os.getpid(), signal.SIGTERM)


def _end_now(number: int, _frame: object) -> None:
    """End at once: until the job has a handler of its own, there is nothing to settle."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end_now)
    threading.Thread(target=_end_with_the_scheduler, name="scheduler", daemon=True).start()
    # The dlqbatch of the scheduler is found, installed or not. The working directory is not searched, and neither is
    # this folder, whose modules would pass for others of their names.
    sys.path[:] = [place for place in sys.path if place != str(Path(__file__).resolve().parent)]
    if _HOME not in sys.path:
        sys.path.insert(0, _HOME)
    runpy.run_module("dlqbatch", run_name="__main__", alter_sys=True)
