"""What a round stands on: a broker, a node that may be killed, a database, chance, a folder."""

from __future__ import annotations

import contextlib
import random
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import psycopg

from scripts import services
from scripts.servers.management import Management, ManagementError
from scripts.servers.postgres import PostgresCluster
from scripts.servers.rabbitmq import RabbitNode

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path


class Servers:
    """Private servers, each started when somebody first asks for it; they may be broken, and are mended for the next.

    `addresses` are of a broker that is there already, and that no round may break: its AMQP address without a virtual
    host, and that of its HTTP API.
    """

    def __init__(self, folder: Path, release: str, addresses: tuple[str, str] | None = None) -> None:
        self.folder, self.release = folder, release
        self._addresses = addresses
        self._node: RabbitNode | None = None
        self._cluster: PostgresCluster | None = None

    @property
    def node(self) -> RabbitNode:
        if self._node is None:
            place = self.folder / f"rabbitmq-{secrets.token_hex(2)}"
            self._node = RabbitNode(place) if self.release == "3.10" else services.node_of_43(place)
            self._node.start()
        elif not self._node.ready():
            self._node.restart()
        return self._node

    @property
    def broker(self) -> tuple[str, str]:
        if self._addresses is not None and self._node is None:
            return self._addresses
        return self.node.url.rpartition("/")[0], self.node.management_url

    @property
    def cluster(self) -> PostgresCluster:
        if self._cluster is None:
            self._cluster = PostgresCluster(self.folder / f"postgres-{secrets.token_hex(2)}").start()
        elif not self._cluster.ready():
            self._cluster.restart()
        return self._cluster

    def replace(self) -> None:
        """After a round that failed: nothing of its servers is used again."""
        for server in (self._node, self._cluster):
            if server is not None:
                server.abandon()
        self._node = self._cluster = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.replace()


@dataclass
class Ground:
    """One round's own: nothing of it is used by another."""

    servers: Servers
    kind: str
    """What of the fault's `kinds` this round is of."""
    seed: str
    folder: Path
    management: Management
    url: str
    """An empty virtual host of this round's own, as guest."""
    notes: list[str] = field(default_factory=list)
    started: list[subprocess.Popen[str]] = field(default_factory=list)
    """Processes of this round; whatever is left of them ends with it."""
    _databases: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stack = contextlib.ExitStack()
        """Closed at the end of the round."""
        self.random = random.Random(self.seed)

    @property
    def node(self) -> RabbitNode:
        """The node to be killed, stopped or restarted; ask for it before anything is declared on `url`."""
        return self.servers.node

    @property
    def cluster(self) -> PostgresCluster:
        """The PostgreSQL server to be killed, stopped or restarted."""
        return self.servers.cluster

    @property
    def management_url(self) -> str:
        return self.servers.broker[1]

    def database(self) -> str:
        """A new, empty database: SQLite if that is this round's kind, else PostgreSQL."""
        name = f"round_{secrets.token_hex(6)}"
        if self.kind == "sqlite":
            return f"sqlite:///{self.folder / name}.sqlite3"
        with self._maintenance() as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        self._databases.append(name)
        return self.cluster.url.rpartition("/")[0] + "/" + name

    def note(self, *what: object) -> None:
        """Something to be shown if the round fails: a report, a figure."""
        self.notes.append(" ".join(str(each) for each in what))

    def close(self) -> None:
        with contextlib.suppress(OSError, ManagementError):
            self.stack.close()
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()
        if not self._databases:
            return
        with contextlib.suppress(psycopg.Error), self._maintenance() as connection:
            for name in self._databases:
                connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())

    def _maintenance(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.cluster.url.replace("+psycopg", ""), autocommit=True)


@contextlib.contextmanager
def new_ground(servers: Servers, kind: str, seed: str, *, breaks_node: bool = False) -> Iterator[Ground]:
    """`breaks_node` takes a private node even where another broker was given."""
    if breaks_node:
        _ = servers.node
    server, api = servers.broker
    management = Management(api, vhost=f"round-{secrets.token_hex(4)}")
    management.make_vhost()
    folder = servers.folder / f"round-{secrets.token_hex(4)}"
    folder.mkdir()
    ground = Ground(servers, kind, seed, folder, management, f"{server}/{management.vhost}")
    try:
        yield ground
    finally:
        ground.close()
        with contextlib.suppress(OSError, ManagementError):
            management.drop_vhost()
