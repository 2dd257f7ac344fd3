"""A replay with `--rate`: how near to what was asked for the messages go out.

Usage: scripts/bench replay_rate [--rates N,…] [--seconds-each N] [--rounds N] [--json FILE]
Each replay has as many messages as the rate asks for in --seconds-each. The rate is that of the run: the messages, but
the first, over the time from the first to the last that the origin's queue was seen to get.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import contenders
import jobs
from contest import Sample, keep, machine, spread, take_turns
from workload import ORIGIN, connect

sys.path.insert(0, str(Path(__file__).parent.parent))
from dlqbatch import jobs as all_jobs
from dlqbatch import logs
from dlqbatch.replay import job as replay
from dlqbatch.replay.batches import ApplyOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlqbatch.settings import Settings

LOOK_SECONDS: Final = 0.005


class Watch(threading.Thread):
    """Sees the origin's queue fill: when its first message was there, and when all were."""

    def __init__(self, url: str, number: int) -> None:
        super().__init__(daemon=True)
        self._url, self._number = url, number
        self.first: tuple[float, int] | None = None
        self.last = 0.0
        self.is_over = False

    def run(self) -> None:
        with connect(self._url) as connection:
            channel = connection.channel()
            while not self.is_over:
                there = channel.queue_declare(ORIGIN, passive=True).method.message_count
                now = time.perf_counter()
                if there and self.first is None:
                    self.first = (now, there)
                if there >= self._number:
                    self.last = now
                    return
                connection.process_data_events(LOOK_SECONDS)

    def per_second(self) -> float:
        self.join(30)
        self.is_over = True
        if self.first is None or not self.last:
            raise SystemExit("the origin's queue did not get every message of the replay")
        began, there = self.first
        return (self._number - there) / (self.last - began)


class Course(jobs.Course):
    def __init__(self, settings: Settings, meter: jobs.Meter, rate: int) -> None:
        super().__init__(settings, meter, size=1024, stored=0)
        self.rate = rate

    def at_the_rate(self) -> Sample:
        self._ready_to_replay()
        watch = Watch(self.broker_url, self.number)
        watch.start()
        asked = ApplyOptions(canary=False, rate=f"{self.rate}/s")
        report = replay.apply_replay(self.settings, all_jobs.RunOptions(), self.plan.hash, asked, actor=jobs.WHO).report
        if report.counts["sent"] != self.number or report.outcome != "ok":
            raise SystemExit(f"the replay did not do its work: {report.as_dict()}")
        sample = Sample(watch.per_second())
        self._empty()
        return sample


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="100,1000")
    parser.add_argument("--seconds-each", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logs.configure("error")
    broker_url, api = os.environ[f"{jobs.PREFIX}BROKER_URL"], os.environ[f"{jobs.PREFIX}MANAGEMENT_URL"]
    rates = list(map(int, options.rates.split(",")))
    cases: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="dlqbatch-bench-") as folder, jobs.server_of_databases() as server:
        meter = jobs.Meter.of(server, api)
        version = jobs.version_of(server)
        for place, rate in enumerate(rates):
            number = max(int(rate * options.seconds_each), 2)
            with jobs.database(server) as database_url:
                settings = jobs.settings_for(broker_url, database_url, Path(folder), number)
                course = Course(settings, meter, rate)
                course.prepare()
                title = f"--rate {rate}/s, {number:,} messages"
                turn: dict[str, Callable[[], Sample]] = {"replay": course.at_the_rate}
                turns = take_turns(turn, options.rounds, {}, len(rates) - place)
                seen = spread([sample.per_second for sample in turns["replay"]], 1)
                found = {"replay": {"per_second": seen}}
                cases[title] = {"of": "replay", "rate": rate, "messages": number, "contenders": found}
                print(f"{title}: {seen['median']:,.1f}/s ({seen['least']:,.1f} to {seen['most']:,.1f})")
    contenders.remove_all(api)
    about = machine() | {"postgresql": version}
    keep("replay_rate", {"benchmark": "replay_rate", "machine": about, "cases": cases}, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
