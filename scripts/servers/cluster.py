"""Three RabbitMQ nodes on loopback, joined into one cluster."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Self

from .management import Management
from .rabbitmq import YIELDING, Epmd, RabbitNode, Release, installed_sbin
from .server import HANGS_AFTER, TURN_SECONDS, ServiceError

if TYPE_CHECKING:
    from pathlib import Path

SIZE = 3
# A new node looks for these and joins the first that runs; one that has been in the cluster knows its own peers.
PEERS = """\
cluster_formation.peer_discovery_backend = classic_config
cluster_formation.classic_config.nodes.1 = {first}
cluster_formation.classic_config.nodes.2 = {own}
cluster_formation.randomized_startup_delay_range.min = 0
cluster_formation.randomized_startup_delay_range.max = 1
"""


class RabbitCluster:
    """Its nodes have one epmd and one cookie between them; each can be killed and restarted by itself."""

    def __init__(self, folder: Path, *, release: Release | None = None) -> None:
        release = release or Release(installed_sbin())
        self.epmd = Epmd(folder / "epmd", release=release)
        cookie = secrets.token_hex(16)
        self.nodes: list[RabbitNode] = []
        for number in range(1, SIZE + 1):
            # One scheduler each: three that take every core get into each other's way.
            node = RabbitNode(
                folder / f"node-{number}",
                release=release,
                epmd=self.epmd,
                cookie=cookie,
                erlang_flags=f"+S 1:1 {YIELDING}",
            )
            if self.nodes:
                node.config += PEERS.format(first=self.nodes[0].name, own=node.name)
            self.nodes.append(node)

    @property
    def url(self) -> str:
        """All nodes, as DLQBATCH_BROKER_URL lists them."""
        return ",".join(node.url for node in self.nodes)

    @property
    def management_url(self) -> str:
        """The first node's; each of them answers for all."""
        return self.nodes[0].management_url

    def node(self, name: str) -> RabbitNode:
        """The one that the broker calls by this name."""
        return next(node for node in self.nodes if node.name == name)

    def launch(self) -> None:
        self.epmd.start()
        self.nodes[0].launch()

    def wait_ready(self, timeout: float = HANGS_AFTER) -> None:
        deadline = time.monotonic() + timeout
        first, *others = self.nodes
        first.wait_ready(timeout)
        for node in others:
            node.launch()
        for node in others:
            node.wait_ready(deadline - time.monotonic())
        while len(running := self.running()) < SIZE:
            if time.monotonic() > deadline:
                raise ServiceError(f"only {running} joined the cluster within {timeout:g} s")
            time.sleep(TURN_SECONDS)

    def running(self) -> list[str]:
        """The nodes that the first one sees."""
        return [node["name"] for node in Management(self.management_url).get("nodes") if node["running"]]

    def start(self) -> Self:
        self.launch()
        self.wait_ready()
        return self

    def abandon(self) -> None:
        for server in (*self.nodes, self.epmd):
            server.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()
