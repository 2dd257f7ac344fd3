"""Whoever breaks things on a broker: deletes, purges and refills its queues, and raises its alarms."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from rawamqp import Peer, _arguments, short

from matrix.work import peer, wait

if TYPE_CHECKING:
    from matrix.ground import Ground
    from matrix.work import Work


class Breaker(Peer):
    def delete(self, queue: str) -> int:
        """How many messages were ready in it."""
        self._send(1, 50, 40, b"\0\0" + short(queue.encode()) + b"\0")
        ready: int = struct.unpack(">I", self._expect(1, 50, 41))[0]
        return ready

    def purge(self, queue: str) -> int:
        """How many messages it took away."""
        self._send(1, 50, 30, b"\0\0" + short(queue.encode()) + b"\0")
        ready: int = struct.unpack(">I", self._expect(1, 50, 31))[0]
        return ready

    def unbind(self, queue: str, exchange: str, key: bytes) -> None:
        names = short(queue.encode()) + short(exchange.encode()) + short(key)
        self._send(1, 50, 50, b"\0\0" + names + _arguments(None))
        self._expect(1, 50, 51)

    def delete_exchange(self, name: str) -> None:
        self._send(1, 40, 20, b"\0\0" + short(name.encode()) + b"\0")
        self._expect(1, 40, 21)


def await_registration(work: Work, ground: Ground) -> None:
    """A node killed within half a second of a quorum queue's declaration forgets which files are the queue's."""
    if ground.kind != "quorum":
        return
    wanted = [f"{ground.management.vhost}_{queue}".encode() for queue in work.queues]

    def is_on_disk() -> bool:
        texts = [path.read_bytes() for path in ground.node.folder.glob("data/node/quorum/*/names.dets")]
        return bool(texts) and all(any(name in text for text in texts) for name in wanted)

    wait(is_on_disk, "the broker to have its queues on disk")


def await_leaders(work: Work, ground: Ground) -> None:
    """A quorum queue that has no leader yet is counted as empty; a get tells it from one that is."""
    with peer(ground) as one:
        for queue in work.queues:
            one._send(1, 60, 70, b"\0\0" + short(queue.encode()) + b"\0")
            _, _, payload = one._frame()
            assert payload[:2] == b"\0\x3c", payload
            if payload[2:4] == b"\0\x47":
                tag = struct.unpack_from(">Q", payload, 4)[0]
                while not _is_whole(one):
                    pass
                one._send(1, 60, 120, struct.pack(">QB", tag, 0b10))


def _is_whole(one: Peer) -> bool:
    _, _, header = one._frame()
    left = struct.unpack_from(">Q", header, 4)[0]
    while left:
        _, _, chunk = one._frame()
        left -= len(chunk)
    return True
