"""Users with just some rights: the commands of docs/permissions.md, and a virtual host for whoever has them."""

from __future__ import annotations

import itertools
import re
import secrets
import shlex
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from program import ROOT, Client

from dlqbatch import settings
from dlqbatch.drain.job import _declared
from dlqbatch.topology.declare import apply_topology
from scripts.servers.management import Management, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DOCS = ROOT / "docs" / "permissions.md"
ORIGIN = "orders-queue"
TARGET = "permanent_failure_queue"
RIGHTS = ("configure", "write", "read")


class Grant(NamedTuple):
    configure: str
    write: str
    read: str
    tags: str = ""

    def names(self, right: str) -> list[str]:
        pattern = re.fullmatch(r"\^\(?(.*?)\)?\$", getattr(self, right))
        assert pattern, f"{right} {getattr(self, right)} is not a list of exact names"
        return [name for name in pattern[1].split("|") if name]

    def lessened(self) -> Iterator[tuple[str, Grant]]:
        """Without each of the names that it allows, one after the other."""
        for right in RIGHTS:
            each = self.names(right)
            for dropped in each:
                rest = "|".join(name for name in each if name != dropped)
                yield f"{right} {dropped}", self._replace(**{right: f"^({rest})$" if rest else "^$"})
        for tag in filter(None, self.tags.split(",")):
            rest = ",".join(one for one in self.tags.split(",") if one != tag)
            yield f"tag {tag}", self._replace(tags=rest)


EVERYTHING = Grant(".*", ".*", ".*", "administrator")


def documented() -> dict[str, Grant]:
    found: dict[str, Grant] = {}
    for line in DOCS.read_text().splitlines():
        if not line.startswith("rabbitmqctl "):
            continue
        _, command, *words = shlex.split(line)
        if command == "set_permissions":
            option, vhost, user, *patterns = words
            assert (option, vhost) == ("-p", "/")
            found[user] = Grant(*patterns)
        elif command == "set_user_tags":
            user, *tags = words
            found[user] = found[user]._replace(tags=",".join(tags))
    return found


class World:
    """A virtual host as its administrator sees it, and users that come and go."""

    def __init__(self, url: str, management: Management, team: Client, policy: Path, folder: Path) -> None:
        self.url, self.management, self.team = url, management, team
        self._policy, self._folder, self._numbers = policy, folder, itertools.count()

    @contextmanager
    def user(self, grant: Grant) -> Iterator[dict[str, str]]:
        """The settings of an installation whose login has just these rights; its database is a new one."""
        name = f"user-{secrets.token_hex(5)}"
        self.management.put(f"users/{name}", {"password": "p", "tags": grant.tags})
        rights = {right: getattr(grant, right) for right in RIGHTS}
        self.management.put(f"permissions/{quoted(self.management.vhost)}/{name}", rights)
        host, port = self.management._address
        try:
            yield {
                "broker_url": self.url.replace("guest:guest@", f"{name}:p@"),
                "management_url": f"http://{host}:{port}",
                "database_url": self.database(),
                "tier_ttls": "1h,1h,1h",
            }
        finally:
            self.management.delete(f"users/{name}")

    def database(self) -> str:
        copy = self._folder / f"{next(self._numbers)}.sqlite3"
        shutil.copyfile(self._policy, copy)
        return f"sqlite:///{copy}"

    def clear(self) -> None:
        for queue in self.management.queues():
            self.team.channel.queue_delete(queue["name"])
        for exchange in self.management.exchanges():
            self.team.channel.exchange_delete(exchange["name"])

    def furnish(self, **given: str) -> None:
        """Our topology as an administrator declares it, and one origin; nothing else, and nothing in it."""
        channel = self.team.channel
        for exchange in self.management.exchanges():
            if exchange["name"].startswith("dlqbatch.return."):
                channel.exchange_delete(exchange["name"])
        for queue in ("dlqbatch.changing", "checkout.delay.relay", TARGET):
            channel.queue_delete(queue)
        apply_topology(load({"broker_url": self.url, "tier_ttls": "1h,1h,1h", **given}))
        self.team.make_origin(ORIGIN)
        for queue in self.management.queues():
            channel.queue_purge(queue["name"])
        _declared.clear()  # each run is one of a process that has just started

    def holds(self) -> dict[str, int]:
        depths = {queue["name"]: self.team.depth(queue["name"]) for queue in self.management.queues()}
        return {queue: depth for queue, depth in depths.items() if depth}

    def topology(self) -> object:
        queues = sorted((one["name"], one["arguments"].get("x-message-ttl")) for one in self.management.queues())
        bindings = sorted((one["source"], one["routing_key"], one["destination"]) for one in self.management.bindings())
        return queues, sorted(one["name"] for one in self.management.exchanges()), bindings


def load(given: dict[str, str]) -> settings.Settings:
    return settings.load(given, {"DLQBATCH_CONFIG": "/dev/null"})
