"""A monitor and a status, put together; neither needs a broker."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from dlqbatch.cloud.receivers import Receivers
from dlqbatch.policy.alerts import Thresholds
from dlqbatch.runs.monitor import Monitor
from dlqbatch.wiring.stores import clock_of, engine_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from dlqbatch.cloud.receivers import Receiver
    from dlqbatch.deadstore.messages import Group
    from dlqbatch.policy.alerts import Notice
    from dlqbatch.policy.metrics import Metrics
    from dlqbatch.runs.report import Report
    from dlqbatch.settings import Settings
    from dlqbatch.wiring.occasion import Occasion

TOP_GROUPS: Final = 5
_LONGEST_TELLING: Final = 10.0
"""Seconds for each receiver; all of them together end before the turn of a worker does."""


@dataclass(frozen=True, slots=True)
class Overview:
    """What `dlqbatch status` shows."""

    metrics: Metrics
    hours: tuple[int, ...]
    """New dead messages in each of the last hours, the oldest first."""
    groups: tuple[Group, ...]
    """The largest that are not over yet."""
    alerts: tuple[Notice, ...]
    """Those that stand."""

    def as_dict(self) -> dict[str, object]:
        return {
            "metrics": self.metrics.as_dict(),
            "ingested_by_hour": list(self.hours),
            "groups": [
                {
                    "fingerprint": group.fingerprint,
                    "size": group.size,
                    "counts": {status.value: number for status, number in group.counts.items()},
                    "first": group.first.isoformat(timespec="seconds"),
                    "last": group.last.isoformat(timespec="seconds"),
                    "error_type": group.sample.error_type,
                    "error_message": group.sample.error_message,
                    "message": group.sample.id,
                }
                for group in self.groups
            ],
            "alerts": [notice.as_dict() for notice in self.alerts],
        }


def monitor(settings: Settings, occasion: Occasion) -> Report:
    from dlqbatch.deadstore.alerts import Alerts  # noqa: PLC0415  (SQLAlchemy costs a fifth of a second)

    engine = engine_for(settings)
    book = Alerts(engine)
    job = Monitor(
        measure=book.measure,
        book=book,
        thresholds=Thresholds(
            settings.alert_ingestion_per_minute,
            settings.alert_backlog,
            settings.alert_resolution_rate,
            settings.alert_new_groups,
        ),
        clock=clock_of(engine),
        tell=_teller(settings, occasion),
        export=None if settings.prometheus_file is None else partial(_export, settings.prometheus_file),
        dry_run=occasion.dry_run,
    )
    return job.run()


def overview(settings: Settings, *, export: bool = False) -> Overview:
    """As it is now; with `export` the file for Prometheus gets it too."""
    from dlqbatch.deadstore.alerts import active  # noqa: PLC0415  (the same)
    from dlqbatch.deadstore.engine import reading  # noqa: PLC0415
    from dlqbatch.deadstore.messages import Filters, groups  # noqa: PLC0415
    from dlqbatch.deadstore.metrics import arrivals_by_hour, measure  # noqa: PLC0415

    engine = engine_for(settings)
    now = clock_of(engine)()
    with reading(engine) as connection:
        found = Overview(
            measure(connection, now),
            tuple(arrivals_by_hour(connection, now)),
            groups(connection, Filters(), TOP_GROUPS).groups,
            active(connection),
        )
    if export and settings.prometheus_file is not None:
        _export(settings.prometheus_file, found.metrics, found.alerts)
    return found


def metrics_text(settings: Settings) -> str:
    """As it is now, for Prometheus."""
    from dlqbatch.cloud.prometheus import render  # noqa: PLC0415  (the same)
    from dlqbatch.deadstore.alerts import active  # noqa: PLC0415
    from dlqbatch.deadstore.engine import reading  # noqa: PLC0415
    from dlqbatch.deadstore.metrics import measure  # noqa: PLC0415

    engine = engine_for(settings)
    now = clock_of(engine)()
    with reading(engine) as connection:
        return render(measure(connection, now), active(connection))


def _teller(settings: Settings, occasion: Occasion) -> Callable[[Sequence[Notice]], str | None] | None:
    found: dict[str, Receiver] = {}
    number = (settings.webhook_url is not None) + (settings.alert_topic is not None)
    seconds = _LONGEST_TELLING
    if occasion.seconds_left is not None:
        seconds = max(min(seconds, (occasion.seconds_left - settings.lambda_margin_seconds) / max(number, 1)), 1.0)
    if settings.webhook_url is not None:
        from dlqbatch.cloud.webhook import Webhook  # noqa: PLC0415  (TLS and HTTP, for those who are told)

        address = settings.webhook_url.get_secret_value()
        found[address] = Webhook(address, total=seconds)
    if settings.alert_topic is not None:
        from dlqbatch.cloud.sns import Topic  # noqa: PLC0415  (the same)

        found[settings.alert_topic] = Topic(settings.alert_topic, total=seconds)
    return Receivers(settings.database_url.get_secret_value(), found).tell if found else None


def _export(path: Path, metrics: Metrics, active: Sequence[Notice]) -> None:
    from dlqbatch.cloud.prometheus import render, write  # noqa: PLC0415  (only for those who want the file)

    write(path, render(metrics, active))
