"""Which modules one run of drain visits, and how often one of its messages changes from one folder to another.

Usage: scripts/bench walk [--messages N] [--modules] [--release 4.3]
A module is visited when one of its functions is called; a change is a call into another folder than the last call's.
What a message costs is the difference between two runs, one with twice as many messages. The log of runs, the policy's
database and the command line are left out: only `jobs.run` is watched.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType

from drain import PREFIX, SOURCE, TARGET, settings_for
from workload import connect, fill

sys.path.insert(0, str(Path(__file__).parent.parent))
from dlqbatch import jobs, logs
from dlqbatch.settings import Settings
from dlqbatch.topology.declare import apply_topology

PACKAGE = str(Path(__file__).parent.parent / "dlqbatch") + os.sep


class Walk:
    """The modules in the order of their first visit, and the changes of folder by where from and where to."""

    def __init__(self) -> None:
        self.modules: dict[str, int] = {}
        self.changes: Counter[tuple[str, str]] = Counter()
        self._folder = ""

    def see(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or code.co_name == "<module>" or not code.co_filename.startswith(PACKAGE):
            return
        module = code.co_filename.removeprefix(PACKAGE).removesuffix(".py").replace(os.sep, ".")
        self.modules[module] = self.modules.get(module, 0) + 1
        folder = module.split(".")[0]
        if folder != self._folder:
            self.changes[self._folder, folder] += 1
            self._folder = folder


def walk(settings: Settings, url: str, messages: int) -> Walk:
    with connect(url) as connection:
        channel = connection.channel()
        channel.queue_purge(SOURCE)
        fill(channel, SOURCE, messages, 1024)
        found = Walk()
        sys.setprofile(found.see)
        try:
            report = jobs.run("drain", settings, jobs.RunOptions())
        finally:
            sys.setprofile(None)
        channel.queue_purge(TARGET)
    assert report.counts["delayed"] == messages, report
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000)
    parser.add_argument("--modules", action="store_true", help="name the modules in the order of their first visit")
    options = parser.parse_args()
    logs.configure("warning")
    url = os.environ[f"{PREFIX}BROKER_URL"]
    with tempfile.TemporaryDirectory() as folder:
        most = 2 * options.messages
        settings = settings_for(url, Path(folder), messages=most, policy_rows=10, queue_type="classic")
        apply_topology(settings)
        few, many = (walk(settings, url, number) for number in (options.messages, most))
    print(f"{len(many.modules)} modules in {len({each.split('.')[0] for each in many.modules})} folders are visited")
    extra = many.changes - few.changes
    print(f"a message changes {extra.total() / options.messages:.1f} times from one folder to another:")
    for (before, after), number in extra.most_common(20):
        print(f"{number / options.messages:6.2f}  {before} -> {after}")
    if options.modules:
        print(*many.modules, sep="\n")


if __name__ == "__main__":
    main()
