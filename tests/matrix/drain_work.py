"""A drain to be broken: a ladder, and failures on all of its queues."""

from __future__ import annotations

from typing import TYPE_CHECKING

import drain_setup
import oracle

from matrix.witness import judge
from matrix.work import QUIET_WITHIN, peer, retried, under_way, wait

if TYPE_CHECKING:
    from collections.abc import Sequence

    from frame_link import FrameLink
    from rawamqp import Peer, Seen

    from matrix.ground import Ground


class DrainWork:
    job = "drain"
    sources: Sequence[str] = drain_setup.LADDER
    tier_ttls = "1h,1h,1h"

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.expected: dict[bytes, Seen] = {}
        given = {"DLQBATCH_QUEUE_TYPE": ground.kind, "DLQBATCH_TIER_TTLS": self.tier_ttls}
        setting = drain_setup.set_stage(ground.url, ground.management, ground.folder, **given)
        self.stage = ground.stack.enter_context(setting)
        self.queues = (*drain_setup.LADDER, *drain_setup.PLACES, drain_setup.COPY)

    @property
    def messages(self) -> int:
        return len(self.expected)

    def fill(self, number: int) -> None:
        with peer(self.ground) as one:
            begin = len(self.expected)
            self.expected |= drain_setup.put(one, drain_setup.ordinary(range(begin, begin + number)))

    def command(self) -> list[str]:
        return ["drain"]

    def settings(self, broker_url: str) -> dict[str, str]:
        given = {name.removeprefix("DLQBATCH_").lower(): value for name, value in self.stage.variables.items()}
        login = given["broker_url"].rpartition("@")[0]
        return given | {"broker_url": f"{login}@{broker_url.rpartition('@')[2]}"}

    def finished(self, one: Peer) -> int:
        return drain_setup.arrived(one)

    def may_double(self, link: FrameLink | None) -> int:
        """What was published, and not acknowledged."""
        return under_way(self, link)

    def settle(self, within: float = QUIET_WITHIN) -> tuple[int, int, int]:
        found: list[Seen] = []

        def all_there() -> bool:
            self.run_until_empty()
            with peer(self.ground) as one:
                found.extend(one.read(*drain_setup.PLACES))
                return len({seen_ticket(seen) for seen in found}) >= len(self.expected) and not drain_setup.waiting(one)

        retried(all_there, within)
        return judge(
            self.ground, self.expected, found, lambda before, after: drain_setup._problems(self.stage, before, after)
        )

    def run_until_empty(self, *queues: str) -> None:
        """Drains in this process, until nothing waits in these queues of the ladder, or in any."""

        def is_empty() -> bool:
            with peer(self.ground) as one:
                if not sum(map(one.depth, queues or drain_setup.LADDER)):
                    return True
            report = self.stage.drain(self.stage.settings())
            self.ground.note(report)
            return False

        wait(is_empty, "drains to empty the queues")


def seen_ticket(seen: Seen) -> bytes:
    return oracle.ticket_of(seen)
