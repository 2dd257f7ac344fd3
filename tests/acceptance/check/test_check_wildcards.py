"""`?` is one character in the names of queues to check, and of their targets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pika
import pytest
from broker_client import Side

from dlqbatch import jobs
from dlqbatch.settings import load

if TYPE_CHECKING:
    from scripts.servers.management import Management

DEATHS = [{"count": 9, "queue": "o", "reason": "rejected", "exchange": "", "routing-keys": ["o"]}]


@pytest.mark.parametrize(
    ("sources", "target", "moved"),
    [("dlq_?", "dead_?", {"dlq_1": "dead_1"}), ("app_*_v?_dlq", "gone_*_?", {"app_x_v3_dlq": "gone_x_3"})],
)
@pytest.mark.usefixtures("on_every_broker")
def test_a_question_mark_is_one_character_of_the_source_and_of_the_target(
    broker_url: str, management: Management, sources: str, target: str, moved: dict[str, str]
) -> None:
    side = Side(broker_url)
    queues = ("dlq_1", "dlq_12", "app_x_v3_dlq", "app_x_v_dlq")
    for queue in queues:
        side.queue(queue)
        side.fill(queue, [b"body"], pika.BasicProperties(headers={"x-death": DEATHS}))
    api = "http://guest:guest@{}:{}".format(*management._address)
    options = {"broker_url": broker_url, "management_url": api, "check_queues": sources, "check_target": target}
    done = jobs.run("check", load(options, {"DLQBATCH_CONFIG": "/dev/null"}), jobs.RunOptions())
    assert (done.outcome, done.counts["moved"]) == ("ok", 1)
    side.wait(lambda: all(side.depth(moved.get(queue, queue)) == 1 for queue in queues))
    assert [side.depth(queue) for queue in moved] == [0]
    side.close()
