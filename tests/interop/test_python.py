"""Frameworks for Python with the helpers of dlqbatch.integrations: six true causes, the whole way of each failure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from client_loop import DYING, ONCE, WORKERS, assert_one_group_for_each_cause, code_of
from program import eventually

if TYPE_CHECKING:
    from client_loop import Loop

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
@pytest.mark.usefixtures("on_every_broker")
def test_celery_hands_over_what_failed_with_its_error(loop: Loop, frameworks: str, queue_type: str) -> None:
    """On quorum queues each task is sent with a native delay."""
    worker = str(WORKERS / "celery_worker.py")
    loop.start(frameworks, worker, "work", QUEUE_TYPE=queue_type)
    loop.await_consumer("mail")
    loop.call(frameworks, worker, "send", ONCE, *DYING, QUEUE_TYPE=queue_type)
    loop.climb()
    rows = loop.bury()
    assert_one_group_for_each_cause(rows)
    assert {row["event"] for row in rows.values()} == {"order.pay"}
    assert rows["declined-1"]["error_type"] == "PaymentDeclined"
    assert rows["declined-1"]["error_message"] == "card of order 1 declined"
    loop.replay("orders")


@pytest.mark.usefixtures("on_every_broker")
def test_faststream_hands_over_what_failed_with_its_error(loop: Loop, frameworks: str) -> None:
    loop.start(frameworks, str(WORKERS / "faststream_worker.py"), ONCE, *DYING)
    loop.climb()
    rows = loop.bury()
    assert_one_group_for_each_cause(rows)
    assert {row["event"] for row in rows.values()} == {"order.pay"}
    assert rows["declined-1"]["error_type"] == "PaymentDeclined"
    loop.replay("orders")


@pytest.mark.usefixtures("on_every_broker")
def test_dramatiq_hands_over_what_its_own_retries_could_not_save(loop: Loop, frameworks: str) -> None:
    worker = str(WORKERS / "dramatiq_worker.py")
    loop.start(frameworks, worker, "work")
    loop.call(frameworks, worker, "send", ONCE, *DYING)
    loop.await_calls("handled", 1)
    loop.await_depth("dlq-queue", len(DYING))
    rows = loop.bury("dlq-queue", "orders.XQ")
    assert_one_group_for_each_cause(rows)
    assert rows["declined-1"]["error_type"] == "PaymentDeclined"
    loop.replay("orders", "dlq-queue", "orders.XQ")


@pytest.mark.usefixtures("on_every_broker")
def test_what_remoulade_gave_up_is_ingested_with_its_error(loop: Loop, python_of_remoulade: str) -> None:
    worker = str(WORKERS / "remoulade_worker.py")
    loop.start(python_of_remoulade, worker, "work")
    loop.call(python_of_remoulade, worker, "send", ONCE, *DYING)
    loop.await_calls("handled", 1)
    loop.await_depth("orders.XQ", len(DYING))
    rows = loop.bury("orders.XQ")
    assert_one_group_for_each_cause(rows)
    assert rows["declined-1"]["error_type"] == "failing_work.PaymentDeclined"
    loop.replay("orders", "orders.XQ")


@pytest.mark.usefixtures("on_every_broker")
def test_taskiq_hands_over_what_its_own_retries_could_not_save(loop: Loop, frameworks: str) -> None:
    dead = ("dlq-queue", "taskiq.dead_letter")
    worker = str(WORKERS / "taskiq_worker.py")
    loop.start(frameworks, worker, "work")
    loop.await_consumer("orders")
    loop.call(frameworks, worker, "send", ONCE, *DYING)
    loop.await_calls("handled", 1)
    loop.await_depth("dlq-queue", len(DYING))
    rows = loop.bury(*dead)
    assert_one_group_for_each_cause(rows)
    # A replay that fails again has failed, although taskiq knows nothing of its headers.
    again = str(rows["declined-1"]["id"])
    assert loop.program.run("messages", "replay", again).code == 0
    loop.await_depth("dlq-queue", 1)
    assert loop.run("ingest", *dead)["reasons"] == {"attempt-failed": 1}
    loop.replay("orders", *dead)


@pytest.mark.usefixtures("on_every_broker")
def test_aio_pika_hands_over_what_failed_with_its_error(loop: Loop, frameworks: str) -> None:
    loop.start(frameworks, str(WORKERS / "aio_pika_worker.py"))
    loop.await_consumer("orders")
    for name in (ONCE, *DYING):
        loop.team.publish("shop", "order.pay", name.encode())
    loop.climb()
    rows = loop.bury()
    assert_one_group_for_each_cause(rows)
    assert {row["event"] for row in rows.values()} == {"order.pay"}
    loop.replay("orders")


@pytest.mark.usefixtures("on_every_broker")
def test_kombu_hands_over_what_failed_with_its_error(loop: Loop, frameworks: str) -> None:
    start_kombu(loop, frameworks, ONCE, *DYING)
    loop.climb()
    rows = loop.bury()
    assert_one_group_for_each_cause(rows)
    assert {row["event"] for row in rows.values()} == {"order.pay"}
    assert rows["declined-1"]["error_type"] == "PaymentDeclined"
    loop.replay("orders")


def start_kombu(loop: Loop, frameworks: str, *names: str) -> None:
    (code,) = code_of("kombu.md", "python")
    (loop.folder / "page.py").write_text(code)
    loop.start(frameworks, str(WORKERS / "kombu_worker.py"), *names)


@pytest.mark.parametrize("framework", ["celery", "faststream", "kombu"])
def test_what_cannot_be_handed_over_goes_back_into_its_queue(loop: Loop, frameworks: str, framework: str) -> None:
    channel = loop.team.channel
    channel.queue_unbind("retry-queue", "retry-exchange", "retry-routing-key")
    worker = str(WORKERS / f"{framework}_worker.py")
    if framework == "celery":
        loop.start(frameworks, worker, "work")
        loop.await_consumer("mail")
        loop.call(frameworks, worker, "send", "declined-1")
    elif framework == "kombu":
        start_kombu(loop, frameworks, "declined-1")
    else:
        loop.start(frameworks, worker, "declined-1")
    assert eventually(lambda: loop.count("failed") >= 3), loop.log()
    channel.queue_bind("retry-queue", "retry-exchange", "retry-routing-key")
    loop.await_depth("retry-queue", 1)
    loop.await_depth("orders", 0)


def test_what_dramatiq_cannot_hand_over_is_rejected_as_without_the_middleware(loop: Loop, frameworks: str) -> None:
    channel = loop.team.channel
    for key in ("dlq-routing-key", "dlq-exchange"):
        channel.queue_unbind("dlq-queue", "dlq-exchange", key)
    worker = str(WORKERS / "dramatiq_worker.py")
    loop.start(frameworks, worker, "work")
    loop.call(frameworks, worker, "send", "declined-1")
    assert eventually(lambda: loop.count("failed") == 2), loop.log()
    loop.await_depth("orders.XQ", 1)
