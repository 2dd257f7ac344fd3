"""What moves messages in a benchmark: a naive loop, the shovel plugin, the limit, and dlqbatch's drain."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import limit
from contest import Sample
from workload import connect, properties

sys.path.insert(0, str(Path(__file__).parent.parent))
from dlqbatch import jobs
from scripts.servers.management import Management, ManagementError, quoted

if TYPE_CHECKING:
    from dlqbatch.settings import Settings

SHOVEL = "benchmark"
SECONDS = 300.0


def naive(url: str, source: str, exchange: str, key: str, number: int) -> Sample:
    """What most people write first: get, confirmed publish, ack. It knows no policy and changes no header."""
    started, busy = time.perf_counter(), time.process_time()
    connection = connect(url)
    taking, giving = connection.channel(), connection.channel()
    giving.confirm_delivery()
    for _ in range(number):
        method, found, body = taking.basic_get(source)
        giving.basic_publish(exchange, key, body, found, mandatory=True)
        taking.basic_ack(method.delivery_tag)
    connection.close()
    return _sample(number, started, busy)


def raw(
    url: str,
    source: str,
    exchange: str,
    key: str,
    number: int,
    size: int,
    *,
    consuming: bool,
    window: int = limit.WINDOW,
) -> Sample:
    publish = limit.message(exchange, key, properties(1), b"x" * size)
    started, busy = time.perf_counter(), time.process_time()
    (limit.by_consuming if consuming else limit.by_gets)(url, source, publish, number, window)
    return _sample(number, started, busy)


def shovel(api: str, url: str, source: str, exchange: str, key: str, target: str, number: int) -> Sample:
    """The broker's own mover, inside it: on-confirm, prefetch 1000. It decides nothing and changes no header."""
    management = Management(api)
    connection = connect(url)
    channel = connection.channel()
    path = f"parameters/shovel/{quoted('/')}/{SHOVEL}"
    wanted = {
        "src-protocol": "amqp091",
        "src-uri": "amqp://",
        "src-queue": source,
        "src-prefetch-count": 1000,
        "src-delete-after": number,
        "dest-protocol": "amqp091",
        "dest-uri": "amqp://",
        "dest-exchange": exchange,
        "dest-exchange-key": key,
        "ack-mode": "on-confirm",
        "reconnect-delay": 1,
    }
    before = channel.queue_declare(target, passive=True).method.message_count
    started = time.perf_counter()
    management.put(path, {"value": wanted})
    while channel.queue_declare(target, passive=True).method.message_count < before + number:
        if time.perf_counter() - started > SECONDS:
            raise SystemExit("the shovel did not end")
        connection.process_data_events(0.01)
    elapsed = time.perf_counter() - started
    connection.close()
    _gone(management, path)
    return Sample(number / elapsed)


def _gone(management: Management, path: str) -> None:
    """It deletes itself a moment after its last message."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            management.get(path)
        except ManagementError:
            return
        time.sleep(0.05)
    management.delete(path)


def drain(settings: Settings, number: int, counted_as: str = "delayed") -> Sample:
    """The whole run: connecting, loading the policy, the report."""
    return job("drain", settings, number, counted_as)


def job(name: str, settings: Settings, number: int, counted_as: str, wanted: int | None = None) -> Sample:
    """Any job; `number` messages are looked at, of which `wanted` have to be counted so."""
    started, busy = time.perf_counter(), time.process_time()
    report = jobs.run(name, settings, jobs.RunOptions())
    sample = _sample(number, started, busy)
    wanted = number if wanted is None else wanted
    if report.counts[counted_as] != wanted or report.outcome != "ok":
        raise SystemExit(f"the {name} did not do its work: {report.as_dict()}")
    return sample


def broker_version(url: str) -> str:
    connection = connect(url)
    found: Any = connection._impl.server_properties["version"]  # noqa: SLF001  (pika shows it nowhere else)
    connection.close()
    return found.decode() if isinstance(found, bytes) else str(found)


def _sample(number: int, started: float, busy: float) -> Sample:
    busy = time.process_time() - busy
    return Sample(number / (time.perf_counter() - started), busy / number * 1e6)


def remove_all(api: str) -> None:
    """The broker is private: every queue and exchange on it is the benchmark's."""
    management = Management(api)
    for kind, found in (("queues", management.queues()), ("exchanges", management.exchanges())):
        for one in found:
            management.delete(f"{kind}/{quoted('/')}/{quoted(one['name'])}")
