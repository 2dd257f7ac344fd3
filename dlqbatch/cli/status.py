"""`dlqbatch status`: the dead store and the runs on one screen of 80 by 24."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Final

from dlqbatch.cli.charts import bar, sparkline
from dlqbatch.cli.choices import AsJson, Config, Settings, configured
from dlqbatch.cli.monitor import Prometheus  # noqa: TC001  (typer reads it)
from dlqbatch.cli.printing import print_json
from dlqbatch.logs import masked, plain
from dlqbatch.wiring.monitor import overview

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime

    from dlqbatch.policy.metrics import Metrics
    from dlqbatch.wiring.monitor import Overview

_NARROWEST: Final = 60
_WIDEST: Final = 120
_BAR: Final = 16
_SHOWN: Final = 3
"""Lines for groups, for error types, for alerts."""
_RUNS: Final = 8
_MINUTE, _HOUR, _DAY = 60, 3_600, 86_400


def status(
    settings: Settings = None,
    config: Config = None,
    *,
    prometheus: Prometheus = None,
    as_json: AsJson = False,
) -> None:
    """Show how the dead store and the jobs are doing, on one screen. It changes nothing and needs no broker."""
    given = {"prometheus_file": None if prometheus is None else str(prometheus)}
    found = overview(configured(settings, config, given), export=prometheus is not None)
    if as_json:
        print_json(found.as_dict())
        return
    encoding = sys.stdout.encoding or "ascii"
    is_ascii = encoding.lower().replace("-", "") != "utf8"
    width = min(max(shutil.get_terminal_size().columns, _NARROWEST), _WIDEST)
    for line in _screen(found, ascii_only=is_ascii):
        shown = plain(masked(line).rstrip(), width)
        sys.stdout.write(shown.encode(encoding, "backslashreplace").decode(encoding) + "\n")


def _screen(found: Overview, *, ascii_only: bool) -> Iterator[str]:
    metrics = found.metrics
    groups = metrics.groups_for_a_person
    needed = f"; {groups:,} group{'s need' if groups > 1 else ' needs'} a person" if groups else ""
    yield f"dead store at {metrics.at:%Y-%m-%d %H:%M:%S} UTC, {sum(metrics.states.values()):,} messages{needed}"
    yield from _states(metrics, ascii_only=ascii_only)
    chart = sparkline(found.hours, ascii_only=ascii_only)
    yield f"new, 24 h   {chart} {sum(found.hours):,}; last hour {metrics.ingested_last_hour:,}"
    decided = ", ".join(f"{name} {number:,}" for name, number in metrics.outcomes.items() if number)
    yield f"last hour   resolved {_rate(metrics.resolution_rate)}{f' of {decided}' if decided else ''}; " + (
        f"{_age(metrics.seconds_in_store)} in store" if metrics.seconds_in_store is not None else "nothing ended"
    )
    yield (
        f"succeeded   retries {_rate(metrics.retry_success)}, replays {_rate(metrics.replay_success)}; "
        f"drains dead-lettered {_rate(metrics.dead_letter_rate)}"
    )
    yield f"due         {metrics.due:,} now, next {_when(metrics.next_due, metrics.at)}; {_breakers(metrics)}"
    yield from _errors(metrics, ascii_only=ascii_only)
    yield from _groups(found)
    yield from _alerts(found)
    yield from _runs(metrics)


def _states(metrics: Metrics, *, ascii_only: bool) -> Iterator[str]:
    """Two in a line: what is not over yet on the left."""
    top = max(metrics.states.values(), default=0)
    cells = [
        f"{name:<11} {number:>9,} {bar(number, top, _BAR, ascii_only=ascii_only)}"
        for name, number in metrics.states.items()
    ]
    half = (len(cells) + 1) // 2
    for left, right in zip(cells[:half], [*cells[half:], ""][:half], strict=True):
        yield f"{left:<40}{right}"


def _errors(metrics: Metrics, *, ascii_only: bool) -> Iterator[str]:
    named = metrics.errors.named
    top = named[0][1] if named else 0
    for place, (name, number) in enumerate(named[:_SHOWN]):
        chart = f"{bar(number, top, _BAR, ascii_only=ascii_only):<{_BAR}}"
        yield f"{'errors, 24 h' if not place else '':<12}{number:>9,} {chart} {plain(name)}"


def _groups(found: Overview) -> Iterator[str]:
    for place, group in enumerate(found.groups[:_SHOWN]):
        sample = group.sample
        what = ": ".join(" ".join(text.split()) for text in (sample.error_type, sample.error_message) if text)
        yield f"{'groups' if not place else '':<12}{group.size:>9,} {group.fingerprint} {plain(what)}"


def _alerts(found: Overview) -> Iterator[str]:
    for place, notice in enumerate(found.alerts[:_SHOWN]):
        age = _age((found.metrics.at - notice.fired_at).total_seconds())
        yield f"{'ALERTS' if not place else '':<12}{notice.severity.value:>9} {notice.name} for {age}: {notice.summary}"
    if len(found.alerts) > _SHOWN:
        yield f"{'':<12}{'':>9} and {len(found.alerts) - _SHOWN:,} more: dlqbatch status --json"
    if not found.alerts:
        yield f"{'alerts':<12}     none"


def _runs(metrics: Metrics) -> Iterator[str]:
    """Two in a line."""
    cells = [
        f"{run.job:>9} {run.outcome:<8}{_age((metrics.at - run.ended_at).total_seconds()):>7} ago"
        for run in metrics.last_runs[:_RUNS]
    ]
    for place in range(0, len(cells), 2):
        yield f"{'last runs' if not place else '':<12}{'   '.join(cells[place : place + 2])}"
    if not cells:
        yield f"{'last runs':<12}     none known"


def _breakers(metrics: Metrics) -> str:
    held: Sequence[str] = [f"{number} {phase}" for phase, number in metrics.breakers.items() if number]
    if not held:
        return "no circuit breaker open"
    return f"circuit breakers {', '.join(held)}: {plain(', '.join(metrics.origins_held))}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _when(at: datetime | None, now: datetime) -> str:
    return "-" if at is None else f"in {_age((at - now).total_seconds())}"


def _age(seconds: float) -> str:
    """To about two digits."""
    seconds = max(seconds, 0)
    if seconds < 2 * _MINUTE:
        return f"{seconds:.0f} s"
    if seconds < 2 * _HOUR:
        return f"{seconds / _MINUTE:.0f} min"
    return f"{seconds / _HOUR:.0f} h" if seconds < 2 * _DAY else f"{seconds / _DAY:.0f} d"
