"""`dlqbatch status`: the dead store and the last runs on one screen of 80 by 24 characters."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final

from dlqbatch.cli.options import AsJson, ConfigFile, Prometheus, Remote, ScopeName, SettingPairs, load_settings
from dlqbatch.cli.printing import print_json
from dlqbatch.cli.reach import Reach
from dlqbatch.logs import masked, plain
from dlqbatch.store.scope_name import EVERY

if TYPE_CHECKING:  # they need SQLAlchemy, which a help page does not
    from dlqbatch.monitor.job import Overview
    from dlqbatch.monitor.metrics import Metrics

_NARROWEST: Final = 60
_WIDEST: Final = 120
_BAR: Final = 16
_LINES: Final = 23
"""The lines of a screen, without the last one, which is the shell's."""
_SHOWN: Final = 3
"""The most lines each for alerts, groups, error types, and origins with unproven retries."""
_RUNS: Final = 8
_LONGEST_QUEUE: Final = 30
_MINUTE, _HOUR, _DAY = 60, 3_600, 86_400


def status(
    settings: SettingPairs = None,
    config: ConfigFile = None,
    *,
    scope: ScopeName = None,
    remote: Remote = None,
    prometheus: Prometheus = None,
    as_json: AsJson = False,
) -> None:
    """Show how the dead store and the jobs are doing, on one screen. It changes nothing and needs no broker.

    dlqbatch status
    """
    from dlqbatch.monitor.job import overview

    flags = {"prometheus_file": None if prometheus is None else str(prometheus), "scope": scope, "remote": remote}
    reach = Reach(load_settings(settings, config, flags, may_be_remote=True))
    if prometheus is not None:
        reach.here("`dlqbatch status` without --prometheus does. ")
    view = reach.run(overview, export=prometheus is not None)
    if as_json:
        print_json(view.as_dict())
        return
    encoding = sys.stdout.encoding or "ascii"
    is_ascii = encoding.lower().replace("-", "") != "utf8"
    width = min(max(shutil.get_terminal_size().columns, _NARROWEST), _WIDEST)
    for line in _fitting(view, ascii_only=is_ascii):
        shown = plain(masked(line).rstrip(), width)
        sys.stdout.write(shown.encode(encoding, "backslashreplace").decode(encoding) + "\n")


def _fitting(view: Overview, *, ascii_only: bool) -> list[str]:
    """The lines of the screen. If they are too many, fewer examples of each kind are shown, but at least one.

    Runs, queues and numbers are always shown whole, and an alert less if all else is not enough.
    """
    lines: list[str] = []
    for shown, alerts in (*((shown, _SHOWN) for shown in range(_SHOWN, 0, -1)), (1, _SHOWN - 1)):
        lines = list(_screen(view, shown, alerts, ascii_only=ascii_only))
        if len(lines) <= _LINES:
            break
    return lines


def _screen(view: Overview, shown: int, alerts: int, *, ascii_only: bool) -> Iterator[str]:
    metrics = view.metrics
    groups = metrics.groups_for_a_person
    needed = f"; {groups:,} group{'s need' if groups > 1 else ' needs'} a person" if groups else ""
    yield f"dead store at {metrics.at:%Y-%m-%d %H:%M:%S} UTC, {sum(metrics.states.values()):,} messages{needed}"
    yield from _whose(view)
    yield from _states(metrics, ascii_only=ascii_only)
    chart = sparkline(view.hours, ascii_only=ascii_only)
    yield f"new, 24 h   {chart} {sum(view.hours):,}; last hour {metrics.ingested_last_hour:,}"
    decided = ", ".join(f"{name} {number:,}" for name, number in metrics.outcomes.items() if number)
    yield f"last hour   resolved {_rate(metrics.resolution_rate)}{f' of {decided}' if decided else ''}; " + (
        f"{_age(metrics.seconds_in_store)} in store" if metrics.seconds_in_store is not None else "nothing ended"
    )
    retries = _rate_of(metrics.retry_success, sum(metrics.attempts.values()))
    open_ones = metrics.replays.get("open", 0)
    replays = _rate_of(metrics.replay_success, metrics.replays_known) + (f" ({open_ones:,} open)" if open_ones else "")
    yield f"succeeded   retries {retries}, replays {replays}; drains dead-lettered {_rate(metrics.dead_letter_rate)}"
    overdue = ", ".join(f"{state} {number:,}" for state, number in metrics.overdue.items() if number)
    if overdue:
        yield f"overdue     {overdue}: retain does not run, or does not keep up"
    yield f"due         {metrics.due:,} now, next {_when(metrics.next_due, metrics.at)}; {_breakers(metrics)}"
    yield from _sent(metrics, shown)
    yield from _queues(metrics)
    yield from _errors(metrics, shown, ascii_only=ascii_only)
    yield from _groups(view, shown)
    yield from _alerts(view, alerts)
    yield from _runs(metrics)


def _whose(view: Overview) -> Iterator[str]:
    """Which deployment's messages these are, as soon as a run has named one."""
    scope, elsewhere = view.whose
    if scope == EVERY:
        yield f"{'of':<12}every deployment; --scope NAME shows one"
    elif scope is not None:
        others = f"; {elsewhere:,} messages in other scopes" if elsewhere else ""
        yield f"{'of':<12}{plain(scope, _LONGEST_QUEUE if elsewhere else _NARROWEST)}{others}"


def _states(metrics: Metrics, *, ascii_only: bool) -> Iterator[str]:
    """Two states in a line, those that are not over yet on the left."""
    top = max(metrics.states.values(), default=0)
    cells = [
        f"{name:<11} {number:>9,} {bar(number, top, _BAR, ascii_only=ascii_only)}"
        for name, number in metrics.states.items()
    ]
    half = (len(cells) + 1) // 2
    for left, right in zip(cells[:half], [*cells[half:], ""][:half], strict=True):
        yield f"{left:<40}{right}"


def _sent(metrics: Metrics, shown: int) -> Iterator[str]:
    """One line for each origin whose retries are not known to have succeeded, the oldest first, and why."""
    if metrics.oldest_sent is None:
        return
    age = _age((metrics.at - metrics.oldest_sent).total_seconds())
    origins = len(metrics.unproven)
    rest = f"; unproven at {origins:,} origins" if origins > shown else ""
    yield f"sent        {metrics.sent:,} retries not resolved, the first {age} ago{rest}"
    for each in metrics.unproven[:shown]:
        yield f"{'':<12}{each.retries:>9,} to {plain(each.place, _LONGEST_QUEUE)}: {plain(each.missing)}"


def _queues(metrics: Metrics) -> Iterator[str]:
    """One line with the deepest queues, and when they were that deep."""
    if metrics.queues:
        top = metrics.queues[:_SHOWN]
        shown = ", ".join(
            f"{each.depth:,} in {plain(each.queue, _LONGEST_QUEUE)} {_age((metrics.at - each.at).total_seconds())} ago"
            for each in top
            if each.depth
        )
        in_a_row = metrics.bounds_in_a_row.items()
        bounded = "".join(f"; {number} {job}s in a row at their bound" for job, number in in_a_row if number > 1)
        yield f"queues      {shown or 'all were empty'}{bounded}"


def _errors(metrics: Metrics, shown: int, *, ascii_only: bool) -> Iterator[str]:
    named = metrics.errors.named
    top = named[0][1] if named else 0
    for place, (name, number) in enumerate(named[:shown]):
        chart = f"{bar(number, top, _BAR, ascii_only=ascii_only):<{_BAR}}"
        yield f"{'errors, 24 h' if not place else '':<12}{number:>9,} {chart} {plain(name)}"
    if rest := sum(number for _, number in named[shown:]) + metrics.errors.other:
        yield f"{'':<12}{rest:>9,} with other errors: dlqbatch status --json"


def _groups(view: Overview, shown: int) -> Iterator[str]:
    for place, group in enumerate(view.groups[:shown]):
        sample = group.sample
        what = ": ".join(" ".join(text.split()) for text in (sample.error_type, sample.error_message) if text)
        yield f"{'groups' if not place else '':<12}{group.size:>9,} {group.fingerprint} {plain(what)}"


def _alerts(view: Overview, shown: int) -> Iterator[str]:
    for place, notice in enumerate(view.alerts[:shown]):
        age = _age((view.metrics.at - notice.fired_at).total_seconds())
        yield f"{'ALERTS' if not place else '':<12}{notice.severity.value:>9} {notice.name} for {age}: {notice.summary}"
    if len(view.alerts) > shown:
        yield f"{'':<12}{'':>9} and {len(view.alerts) - shown:,} more: dlqbatch status --json"
    if not view.alerts:
        yield f"{'alerts':<12}     none"


def _runs(metrics: Metrics) -> Iterator[str]:
    """Two runs in a line."""
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


def _rate_of(value: float | None, number: int) -> str:
    return "-" if value is None else f"{value:.0%} of {number:,}"


def _when(at: datetime | None, now: datetime) -> str:
    return "-" if at is None else f"in {_age((at - now).total_seconds())}"


def _age(seconds: float) -> str:
    """A duration with about two digits."""
    seconds = max(seconds, 0)
    if seconds < 2 * _MINUTE:
        return f"{seconds:.0f} s"
    if seconds < 2 * _HOUR:
        return f"{seconds / _MINUTE:.0f} min"
    return f"{seconds / _HOUR:.0f} h" if seconds < 2 * _DAY else f"{seconds / _DAY:.0f} d"


_STEPS: Final = "▁▂▃▄▅▆▇█"
_ASCII_STEPS: Final = "_.:-=+*#"
_EIGHTHS: Final = " ▏▎▍▌▋▊▉"


def sparkline(numbers: Sequence[float], *, ascii_only: bool) -> str:
    """One character for each number: the lowest one only for zero, the highest one for the largest number."""
    steps = _ASCII_STEPS if ascii_only else _STEPS
    top = max(numbers, default=0)
    if not top:
        return steps[0] * len(numbers)
    last = len(steps) - 1
    return "".join(steps[max(1, round(number / top * last))] if number else steps[0] for number in numbers)


def bar(number: float, top: float, width: int, *, ascii_only: bool) -> str:
    """A bar of at most `width` characters; every number but zero has a visible one."""
    if not number or not top:
        return ""
    if ascii_only:
        return "#" * max(1, round(number / top * width))
    eighths = max(1, round(number / top * width * 8))
    whole, part = divmod(eighths, 8)
    return "█" * whole + (_EIGHTHS[part] if part else "")
