"""Every benchmark, one after the other, each on servers of its own; what each has seen is kept as it ends.

Usage: scripts/bench all [--quick] [--write] [--only NAME,…] [--minutes N] [--results FOLDER]
It takes at most --minutes: no benchmark begins later, and one that takes longer is ended. One that fails loses nothing
of the others. Results go to build/benchmarks; with --write to benchmarks/results, and docs/performance.md is written
from them. --only runs some again, and leaves the results of the others as they are.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import performance
from charts import blocks_of
from contest import KEPT, machine
from plan import PLAN, Entry
from plot import picture

if TYPE_CHECKING:
    from types import FrameType

ROOT: Final = Path(__file__).parent.parent
QUICK_TURNS: Final = 15.0
SECONDS_TO_END: Final = 45.0
"""For what is told to end, with its servers."""


class Record:
    """run.json: what was run when, and what came of it; written anew after each."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "run.json"
        self.entries: dict[str, Any] = {}
        with contextlib.suppress(FileNotFoundError):
            self.entries = json.loads(self._file.read_text(encoding="utf-8"))["entries"]

    def add(self, name: str, told: dict[str, Any]) -> None:
        self.entries[name] = told
        ordered = {entry.name: self.entries[entry.name] for entry in PLAN if entry.name in self.entries}
        replace(self._file, json.dumps({"machine": machine(), "entries": ordered}, indent=1, ensure_ascii=False) + "\n")


def replace(file: Path, text: str) -> None:
    """All of it or nothing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".tmp")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(file)


def run(entry: Entry, folder: Path, seconds: float, *, quick: bool) -> dict[str, Any]:
    """One benchmark; its result is in the folder, or why there is none."""
    began, clock, load = datetime.now(UTC), time.monotonic(), os.getloadavg()[0]
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("BENCH_", "DLQBATCH_"))}
    # Where RabbitMQ 4.3 is kept, and where it comes from, stays as it is.
    environment |= {name: text for name, text in os.environ.items() if name.startswith("DLQBATCH_TEST_")}
    for name in ("BROKER_URL", "MANAGEMENT_URL", "DATABASE_URL"):
        environment.pop(f"DLQBATCH_TEST_{name}", None)
    if quick or entry.turns is not None:
        environment["BENCH_SECONDS"] = str(QUICK_TURNS if quick else entry.turns)
    with tempfile.TemporaryDirectory(prefix="dlqbatch-bench-") as scratch:
        kept = Path(scratch) / "kept.json"
        command = [str(ROOT / "scripts" / "bench"), *entry.arguments(quick=quick), "--json", str(kept)]
        failure, was_ended = watched(command, environment, seconds)
        found = None
        if failure is None or was_ended:
            # What was kept counts, even of one that then took too long to end its servers.
            with contextlib.suppress(OSError, ValueError):
                found = json.loads(kept.read_text(encoding="utf-8"))
    if found is None:
        failure = failure or "it ended without a result"
        result = {"benchmark": entry.name, "failed": failure}
    else:
        failure = None
        result = found if "benchmark" in found else {"benchmark": entry.name, "rows": found}
    replace(folder / f"{entry.name}.json", json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    replace(folder / f"{entry.name}.svg", picture(blocks_of(result)))
    return {
        "command": " ".join(("scripts/bench", *entry.arguments(quick=quick))),
        "quick": quick,
        "outcome": "done" if failure is None else "failed",
        "began": f"{began:%Y-%m-%d %H:%M}",
        "seconds": round(time.monotonic() - clock),
        "load_at_begin": round(load, 2),
        "load_at_end": round(os.getloadavg()[0], 2),
    } | ({"failure": failure} if failure else {})


def watched(command: list[str], environment: dict[str, str], seconds: float) -> tuple[str | None, bool]:
    """Why it failed, if it did, and whether that is because it was ended. What it says goes on to stderr."""
    last: list[str] = []
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:

        def listen() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                sys.stderr.write(line)
                last[:] = [*last[-4:], line.strip()]

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            end(process)
            return f"it was ended after {seconds:.0f} s", True
        except BaseException:
            end(process)
            raise
        listener.join(10)
    said = next((line for line in reversed(last) if line), "")
    return (None if code == 0 else f"it ended with {code}: {said}"), False


def end(process: subprocess.Popen[str]) -> None:
    """In good order, so that its servers end and their folders go."""
    process.terminate()
    try:
        process.wait(SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()


def _give_up(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few messages: does everything work?")
    parser.add_argument("--write", action="store_true", help="into benchmarks/results and docs/performance.md")
    parser.add_argument("--only", default="", help=", ".join(entry.name for entry in PLAN))
    parser.add_argument("--minutes", type=float, default=55.0)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    folder = options.results or (performance.RESULTS if options.write else KEPT)
    wanted = set(filter(None, options.only.split(",")))
    unknown = wanted - {entry.name for entry in PLAN}
    if unknown:
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(entry.name for entry in PLAN)}")
    signal.signal(signal.SIGTERM, _give_up)
    plan = [entry for entry in PLAN if not wanted or entry.name in wanted]
    record = Record(folder)
    deadline = time.monotonic() + options.minutes * 60
    for number, entry in enumerate(plan, 1):
        # What is needed to end it is not spent before.
        left = deadline - time.monotonic() - SECONDS_TO_END
        sys.stderr.write(f"== {number} of {len(plan)}: {entry.name}; {max(left, 0) / 60:.1f} min are left\n")
        if left <= 0 or (entry.if_time_is_left and not wanted and not options.quick and left < entry.limit / 2):
            skipped = {"outcome": "skipped", "failure": f"no time was left of {options.minutes:g} min"}
            replace(folder / f"{entry.name}.json", json.dumps({"benchmark": entry.name, "failed": skipped["failure"]}))
            record.add(entry.name, skipped)
            continue
        record.add(entry.name, run(entry, folder, min(entry.limit, left), quick=options.quick))
    results = performance.read(folder)
    sys.stdout.write("\n".join(performance.targets_in_words(results)) + "\n")
    if options.write:
        performance.write(folder)
    failed = [entry.name for entry in plan if record.entries[entry.name]["outcome"] == "failed"]
    for name in failed:
        sys.stderr.write(f"{name} failed: {record.entries[name]['failure']}\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
