"""A dead store and a broker between which a test replays: `dlqbatch.replay.job` with little to say."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from program import Client, client
from ready_store import make_tables
from replay_rows import ORIGIN

from dlqbatch.jobs import RunOptions
from dlqbatch.replay import job as replay_job
from dlqbatch.replay.batches import ApplyOptions
from dlqbatch.replay.freeze import Selection
from dlqbatch.settings import load
from dlqbatch.store.engine import create_engine_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine

    from dlqbatch.replay.job import Planned, Replayed
    from dlqbatch.settings import Settings

AT_ONCE = ApplyOptions(canary=False)
EVERYTHING = Selection(everything=True)


class Store:
    def __init__(self, settings: Settings, engine: Engine, team: Client) -> None:
        self.settings, self.engine, self.team = settings, engine, team

    def plan(self, **asked: Any) -> str:
        return self.planned(**asked).frozen.hash

    def planned(self, **asked: Any) -> Planned:
        return replay_job.plan_replay(self.settings, EVERYTHING, **({"actor": "ann", "reason": "why"} | asked))

    def apply(self, name: str, asked: ApplyOptions = AT_ONCE) -> Replayed:
        return replay_job.apply_replay(self.settings, RunOptions(), name, asked, actor="ann")


@contextmanager
def opened(database_url: str, broker_url: str) -> Iterator[Store]:
    make_tables(database_url)
    settings = load({"broker_url": broker_url, "database_url": database_url}, {"DLQBATCH_CONFIG": "/dev/null"})
    with client(broker_url) as team:
        team.channel.queue_declare(ORIGIN, durable=True)
        yield Store(settings, create_engine_for(database_url, connect_timeout=30), team)


def counted(done: Replayed) -> dict[str, int]:
    """What is not 0; all of it together is what was got."""
    counts = {name: number for name, number in done.report.counts.items() if number}
    assert counts.get("got", 0) == sum(number for name, number in counts.items() if name != "got")
    return counts
