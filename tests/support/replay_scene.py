"""A person's terminal, an apply that is under way, and what has arrived of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from program import Client, Program, eventually
from replay_rows import ORIGIN, fill

from dlqbatch.store.engine import create_engine_for

if TYPE_CHECKING:
    import subprocess

    from sqlalchemy import Engine

PARTIAL = 3
SLOWLY = ("--rate", "5/s")


class Scene:
    def __init__(self, broker_url: str, database_url: str, team: Client) -> None:
        self.database_url, self.team = database_url, team
        self.engine: Engine = create_engine_for(database_url, connect_timeout=30)
        self.program = Program({"broker_url": broker_url, "database_url": database_url})

    def plan(self, size: int) -> str:
        fill(self.engine, range(size))
        return str(self.program.run("replay", "plan", "--all", "--json").told["hash"])

    def sends(self, name: str, *pace: str, out: int, by: Program | None = None) -> subprocess.Popen[str]:
        """An apply that has sent so many, or a few more."""
        process = (by or self.program).start("replay", "apply", name, "--no-canary", "--json", *pace)
        assert eventually(lambda: self.team.depth(ORIGIN) >= out or process.poll() is not None)
        assert process.poll() is None, process.communicate()
        return process

    def abort(self, name: str, by: Program | None = None) -> tuple[Any, int]:
        """What it says, and how many were in the queue when it had said so."""
        done = (by or self.program).run("replay", "abort", name, "--json")
        depth = self.team.depth(ORIGIN)
        assert done.code == 0, done.said
        return done.told, depth

    def rows(self, status: str) -> int:
        with self.engine.connect() as connection:
            query = f"SELECT count(*) FROM dlq_messages WHERE status = '{status}'"
            return int(connection.exec_driver_sql(query).scalar_one())
