"""Keeps the machine at a load as long as another process lives: the tests have to pass on a machine that others use.

    python scripts/load.py 15 --while 4711

As many processes of normal priority only count as are missing for 15 that want to run, with the tests' own and with
those of everybody else. They end soon after the process 4711 has ended; then it says what the load has been.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

_LOOKS_FOR_A_STEP = 20
_BETWEEN_LOOKS = 0.25


def burn() -> None:
    """Count until it is ended, or until its parent is gone."""
    parent = os.getppid()
    while os.getppid() == parent:
        for _ in range(2_000_000):
            pass


def want_to_run() -> int:
    """How many processes of the machine run, wait for a core or wait for a disk."""
    lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
    counts = dict(line.split(maxsplit=1) for line in lines)
    return int(counts["procs_running"]) + int(counts["procs_blocked"])


def keep(load: int, watched: int) -> None:
    """Start and end processes as others come and go."""
    children: list[int] = []
    averages = []
    while _is_there(watched):
        seen = 0
        for _ in range(_LOOKS_FOR_A_STEP):
            seen += want_to_run()
            time.sleep(_BETWEEN_LOOKS)
        others = seen / _LOOKS_FOR_A_STEP - len(children)
        missing = min(load, max(0, round(load - others)))
        while len(children) > missing:
            _end(children.pop())
        while len(children) < missing:
            if not (child := os.fork()):
                burn()
                os._exit(0)
            children.append(child)
        averages.append(os.getloadavg()[0])
    for child in children:
        _end(child)
    if averages:
        averages.sort()
        middle, highest = averages[len(averages) // 2], averages[-1]
        print(f"the load of the machine: {middle:.1f} in the middle, {highest:.1f} at most", file=sys.stderr)


def _end(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _is_there(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("load", type=int)
    parser.add_argument("--while", type=int, required=True, dest="watched", metavar="PID")
    wanted = parser.parse_args()
    keep(wanted.load, wanted.watched)


if __name__ == "__main__":
    main()
