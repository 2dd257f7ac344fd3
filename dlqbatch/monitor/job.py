"""The monitor job, which measures the dead store and sends alerts, and what `status` and Prometheus show of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dlqbatch import logs
from dlqbatch.errors import DlqbatchError
from dlqbatch.jobs import Report, RunOptions, count, depths_of, store_by_asking
from dlqbatch.messages.queries import Group, groups
from dlqbatch.messages.shown import masked_record
from dlqbatch.monitor import prometheus
from dlqbatch.monitor.alert_rules import MOST_TRIES, Notice, Settled, Thresholds, of_group, standing, with_most
from dlqbatch.monitor.alerts import Alerts, active
from dlqbatch.monitor.measure import arrivals_by_hour, measure
from dlqbatch.monitor.metrics import Metrics, Reported, report_of_depths
from dlqbatch.retain.rows import keep_of
from dlqbatch.settings import Settings
from dlqbatch.store.access import StoreClock, store_for
from dlqbatch.store.count_changes import merge
from dlqbatch.store.counts import Whose, whose
from dlqbatch.store.engine import reading
from dlqbatch.store.filters import Filters
from dlqbatch.store.states import Status
from dlqbatch.store.stream_tables import known_streams

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from dlqbatch.monitor.webhook_formats import Form
    from dlqbatch.settings.console_options import SecretText

log = logs.get(__name__)

TOP_GROUPS: Final = 5
# The most alerts that a log or a report lists; of the others it has the number.
SHOWN: Final = 20
# Seconds for reading the depths from the broker; the log of runs has depths as well.
_LONGEST_LOOK: Final = 3.0
# Seconds for one call of a receiver; all calls together take less than the claim of a worker lasts.
_LONGEST_CALL: Final = 10.0
# Seconds in which another call of a receiver may begin.
_CALLS_BEGIN_WITHIN: Final = 5.0


@dataclass(frozen=True, slots=True)
class Monitor:
    alerts: Alerts
    thresholds: Thresholds
    clock: Callable[[], datetime]
    receivers: Mapping[str, Callable[[Sequence[Notice]], str | None]] = field(default_factory=dict)
    """For each receiver's name, a call that sends alerts and returns why they were not taken, or None."""
    overdue_before: Callable[[datetime], Mapping[Status, datetime]] = lambda _now: {}
    export: Callable[[Metrics, Sequence[Notice]], None] | None = None
    look: Callable[[], Mapping[str, int]] = dict
    """Reads the depths of the queues that drain and ingest serve, as far as the broker answers."""
    at_once: Mapping[str, int] = field(default_factory=dict)
    """The most alerts that a receiver is sent at once, where that is bounded."""
    dry_run: bool = False

    def run(self) -> Report:
        started = time.monotonic()
        # The log of runs has no depths while the drains cannot start.
        depths = self.look()
        now = self.clock()
        seen = report_of_depths(now, depths) if depths else None
        metrics = self.alerts.measure(now, self.overdue_before(now), seen)
        new = tuple(map(of_group, self.alerts.new_groups())) if self.thresholds.new_groups else ()
        stand = standing(metrics, self.thresholds)
        if stand:
            largest = self.alerts.largest_group()
            stand = tuple(with_most(alert, largest) for alert in stand)
        settled = self.alerts.settle(stand, new, now, receivers=tuple(self.receivers), dry_run=self.dry_run)
        if not self.dry_run:
            self.alerts.note_look(metrics)
            _log(settled)
        active_now = self.alerts.active()
        # The file is written before anything is sent, so that a webhook that hangs does not make its figures old.
        warnings = [] if self.dry_run else [*self._export(metrics, active_now), *self._send()]
        return Report(
            "monitor",
            outcome="partial" if warnings else "ok",
            stopped_by="empty",
            counts=count({}, 0)[0],
            elapsed_seconds=time.monotonic() - started,
            dry_run=self.dry_run,
            warnings=tuple(warnings),
            queues=depths_of(depths, depths),
            details={
                "metrics": metrics.as_dict(),
                "alerts": {
                    "fired": _shown(settled.fired),
                    "resolved": _shown(settled.resolved),
                    "active": _shown(active_now),
                    "numbers": {
                        "fired": len(settled.fired),
                        "resolved": len(settled.resolved),
                        "active": len(active_now),
                    },
                },
            },
        )

    def _export(self, metrics: Metrics, stand: Sequence[Notice]) -> list[str]:
        try:
            if self.export is not None:
                self.export(metrics, stand)
        except DlqbatchError as error:
            return [str(error)]
        return []

    def _send(self) -> list[str]:
        """Send the alerts to each receiver, with no transaction open.

        What a receiver does not take is sent again later. Until then every run is partial, which its exit code shows.
        """
        return [warning for receiver in self.receivers for warning in self._send_to(receiver)]

    def _send_to(self, receiver: str) -> list[str]:
        ends = time.monotonic() + _CALLS_BEGIN_WITHIN
        is_well = False
        # Again after a success, because another worker may have stored an alert during this claim.
        while time.monotonic() < ends:
            turn = self.alerts.take_turn(receiver, self.clock(), is_well=is_well, limit=self.at_once.get(receiver))
            if turn is None:
                break
            why = self.receivers[receiver](turn.notices)
            given_up = self.alerts.end_turn(receiver, turn, self.clock(), taken=why is None)
            if why is not None:
                warnings = [f"{why}; it is tried again, less and less often, for a day"]
                if given_up:
                    warnings.append(
                        f"{given_up:,} alert(s) are not sent to the {receiver} any more: it was tried {MOST_TRIES} "
                        "times in about a day. Look: dlqbatch status"
                    )
                return warnings
            is_well = True
        waits = self.alerts.waiting(receiver)
        if waits is None:
            return []
        when = f"{waits.next_try_at.astimezone(UTC):%H:%M:%S} UTC"
        return [f"{waits.number:,} alert(s) were not taken by the {receiver} so far; it is tried again at {when}"]


def _log(settled: Settled) -> None:
    for notices, event, write in (
        (settled.fired, "alert fired", log.warning),
        (settled.resolved, "alert resolved", log.info),
    ):
        for notice in notices[:SHOWN]:
            write(
                event,
                alert=notice.name,
                severity=notice.severity.value,
                subject=notice.subject or None,
                summary=notice.summary,
                value=notice.value,
                threshold=notice.threshold,
            )
        if len(notices) > SHOWN:
            write(f"{event}: and more", number=len(notices) - SHOWN, look="dlqbatch status")


def _shown(notices: Sequence[Notice]) -> list[dict[str, object]]:
    return [notice.as_dict() for notice in notices[:SHOWN]]


def monitor(settings: Settings, run_options: RunOptions) -> Report:
    engine, scope = store_by_asking(settings, "dlqbatch monitor", dry_run=run_options.dry_run, may_be_any=True)
    if not run_options.dry_run:
        merge(engine)
    from dlqbatch.monitor.webhook_formats import Form  # noqa: PLC0415  (for those who have a receiver)

    form = Form(
        settings.webhook_format, scope or "dlqbatch", settings.console_url, _secret(settings.pagerduty_key) or ""
    )
    job = Monitor(
        alerts=Alerts(engine),
        thresholds=Thresholds(
            ingestion_per_minute=settings.alert_ingestion_per_minute,
            backlog=settings.alert_backlog,
            resolution_rate=settings.alert_resolution_rate,
            resolution_minimum=settings.alert_resolution_minimum,
            new_groups=settings.alert_new_groups,
            queue_depth=settings.alert_queue_depth,
            queue_deep_for=settings.alert_queue_deep_for,
            bounded_runs=settings.alert_bounded_runs,
            unproven_after=settings.alert_unproven_after,
        ),
        clock=StoreClock(engine),
        receivers=_receivers(settings, run_options, form),
        at_once={} if form.at_once is None else {"webhook": form.at_once},
        overdue_before=partial(_overdue_before, settings),
        export=None if settings.prometheus_file is None else partial(_export, settings.prometheus_file),
        look=partial(_look, settings, engine),
        dry_run=run_options.dry_run,
    )
    return replace(job.run(), scope=scope)


def _overdue_before(settings: Settings, now: datetime) -> Mapping[Status, datetime]:
    return keep_of(settings).before(now - settings.alert_overdue)


def _look(settings: Settings, engine: Engine) -> Mapping[str, int]:
    from dlqbatch.monitor.queue_depths import look_once  # noqa: PLC0415  (the broker's client, which no status needs)

    seen = look_once(settings, _LONGEST_LOOK)
    # What a stream holds stays there: only the runs know how much of it is not read.
    streams = known_streams(engine) if seen is not None else frozenset[str]()
    return {} if seen is None else {queue: depth for queue, depth in seen.depths.items() if queue not in streams}


def _secret(value: SecretText | None) -> str | None:
    return None if value is None else value.get_secret_value()


def _receivers(
    settings: Settings, run_options: RunOptions, form: Form
) -> dict[str, Callable[[Sequence[Notice]], str | None]]:
    """The receivers by their names in the database; a receiver with a new address has the same name."""
    if settings.webhook_url is None and settings.alert_topic is None:
        return {}
    from dlqbatch.monitor.receivers import Topic, Webhook  # noqa: PLC0415  (TLS and HTTP, for those who have a receiver)

    seconds = _LONGEST_CALL
    if run_options.seconds_left is not None:
        number = (settings.webhook_url is not None) + (settings.alert_topic is not None)
        seconds = max(min(seconds, (run_options.seconds_left - settings.lambda_margin_seconds) / number), 1.0)
    found: dict[str, Callable[[Sequence[Notice]], str | None]] = {}
    if settings.webhook_url is not None:
        url, secret = settings.webhook_url.get_secret_value(), _secret(settings.webhook_secret)
        found["webhook"] = Webhook(url, total=seconds, form=form, secret=secret).send
    if settings.alert_topic is not None:
        found["topic"] = Topic(settings.alert_topic, total=seconds).send
    return found


def _export(path: Path, metrics: Metrics, stand: Sequence[Notice]) -> None:
    prometheus.write(path, prometheus.text(prometheus.build_info()) + prometheus.render(metrics, stand))


@dataclass(frozen=True, slots=True)
class Overview:
    """What `dlqbatch status` shows."""

    metrics: Metrics
    hours: tuple[int, ...]
    """New dead messages in each of the last hours, the oldest hour first."""
    groups: tuple[Group, ...]
    """The largest groups that are not over yet."""
    alerts: tuple[Notice, ...]
    """The alerts that stand."""
    whose: Whose
    """Whose messages these figures are of."""

    def as_dict(self) -> dict[str, object]:
        return {
            "scope": self.whose.scope,
            "messages_of_other_scopes": self.whose.elsewhere,
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


def overview(settings: Settings, *, export: bool = False) -> Overview:
    """The dead store as it is now; with `export`, also into the file for Prometheus."""
    engine = store_for(settings)
    now = StoreClock(engine)()
    with reading(engine, is_snapshot=True) as connection:
        largest = groups(connection, Filters(), TOP_GROUPS).groups
        found = Overview(
            measure(connection, now, _overdue_before(settings, now)),
            tuple(arrivals_by_hour(connection, now)),
            tuple(replace(each, sample=masked_record(each.sample)) for each in largest),
            active(connection),
            whose(connection),
        )
    if export and settings.prometheus_file is not None:
        _export(settings.prometheus_file, found.metrics, found.alerts)
    return found


def metrics_text(settings: Settings, seen: Reported | None = None) -> str:
    """The dead store as it is now, for Prometheus; `seen` are depths of queues that were seen just now."""
    engine = store_for(settings)
    now = StoreClock(engine)()
    with reading(engine) as connection:
        measured = measure(connection, now, _overdue_before(settings, now), seen)
        return prometheus.render(measured, active(connection))
