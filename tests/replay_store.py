"""A dead store and a broker between which a test replays: `wiring.replay` with little to say."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from program import Client, client
from replay_rows import ORIGIN

from dlqbatch.deadstore import migrate
from dlqbatch.deadstore.engine import create_engine_for
from dlqbatch.settings import load
from dlqbatch.wiring import Occasion
from dlqbatch.wiring import replay as wiring
from dlqbatch.wiring.replay import ReplayAsked

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine

    from dlqbatch.settings import Settings
    from dlqbatch.wiring.replay import Planned, Replayed

AT_ONCE = ReplayAsked(canary=False)


class Store:
    def __init__(self, settings: Settings, engine: Engine, team: Client) -> None:
        self.settings, self.engine, self.team = settings, engine, team

    def plan(self, **asked: Any) -> str:
        return self.planned(**asked).frozen.hash

    def planned(self, **asked: Any) -> Planned:
        return wiring.plan_replay(self.settings, **({"actor": "ann", "reason": "why", "everything": True} | asked))

    def apply(self, name: str, asked: ReplayAsked = AT_ONCE) -> Replayed:
        return wiring.apply_replay(self.settings, Occasion(), name, asked, actor="ann")


@contextmanager
def opened(database_url: str, broker_url: str) -> Iterator[Store]:
    migrate.upgrade(database_url)
    settings = load({"broker_url": broker_url, "database_url": database_url}, {"DLQBATCH_CONFIG": "/dev/null"})
    with client(broker_url) as team:
        team.channel.queue_declare(ORIGIN, durable=True)
        yield Store(settings, create_engine_for(database_url, connect_timeout=30), team)


def counted(done: Replayed) -> dict[str, int]:
    """What is not 0; all of it together is what was got."""
    counts = {name: number for name, number in done.report.counts.items() if number}
    assert counts.get("got", 0) == sum(number for name, number in counts.items() if name != "got")
    return counts
