"""Several drains on the same queues at once: the broker hands each message to one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from drain_setup import PLACES, ordinary, put, report_of, set_stage, verify, waiting
from program import HANGS_AFTER
from rawamqp import Peer

if TYPE_CHECKING:
    from pathlib import Path

    from scripts.servers.management import Management

MESSAGES = 4_000


@pytest.mark.slow
@pytest.mark.parametrize(("drains", "queue_type"), [(2, "classic"), (8, "classic"), (2, "quorum"), (8, "quorum")])
def test_drains_at_once_lose_nothing_and_double_nothing(
    drains: int, queue_type: str, broker_url: str, management: Management, tmp_path: Path
) -> None:
    with (
        set_stage(broker_url, management, tmp_path, DLQBATCH_QUEUE_TYPE=queue_type) as stage,
        Peer(broker_url) as peer,
    ):
        expected = put(peer, ordinary(range(MESSAGES)))
        reports = []
        while waiting(peer):
            processes = [stage.start("--max-messages", "1000") for _ in range(drains)]
            for process in processes:
                output, errors = process.communicate(timeout=HANGS_AFTER)
                assert process.returncode == 0, errors
                reports.append(report_of(output))
            assert len(reports) < 20 * drains, reports

        assert verify(stage, expected, peer.read(*PLACES)) == 0
        total = {name: sum(report["counts"][name] for report in reports) for name in reports[0]["counts"]}
        dead, returned = MESSAGES * 3 // 8, MESSAGES * 2 // 8
        told = {name: number for name, number in total.items() if number}
        assert told == {"got": MESSAGES, "delayed": dead, "returned": returned, "dead_lettered": dead}
