"""Ends the servers of a program that died without ending them itself.

Reads lines on stdin: `watch PID SIGNAL`, `forget PID`, `remove FOLDER`. At the end of stdin, which comes with the
program's death however it died, it signals every process still watched, then deletes the folders.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

PATIENCE_SECONDS = 10.0


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] != "Z"
    return False


def end(watched: dict[int, int]) -> None:
    for pid, number in watched.items():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (left := [pid for pid in watched if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def main() -> None:
    # A signal to the whole process group is for the program; the guard outlives it on purpose.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watched: dict[int, int] = {}
    folders: list[str] = []
    for line in sys.stdin:
        verb, _, rest = line.rstrip("\n").partition(" ")
        if verb == "watch":
            watched[int(rest.split()[0])] = int(rest.split()[1])
        elif verb == "forget":
            watched.pop(int(rest), None)
        elif verb == "remove":
            folders.append(rest)
    end(watched)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
