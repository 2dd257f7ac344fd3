"""Keeps the cores busy as long as another process lives: the tests have to pass on a machine that others use.

    python scripts/load.py 15 --while 4711

Starts 15 processes of normal priority that only count, and end soon after the process 4711 has ended.
"""

from __future__ import annotations

import argparse
import os


def burn(watched: int) -> None:
    """Count until the process is gone."""
    while _is_there(watched):
        for _ in range(2_000_000):
            pass


def _is_there(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("processes", type=int)
    parser.add_argument("--while", type=int, required=True, dest="watched", metavar="PID")
    asked = parser.parse_args()
    for _ in range(asked.processes - 1):
        if not os.fork():
            break
    burn(asked.watched)


if __name__ == "__main__":
    main()
