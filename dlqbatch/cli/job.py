"""A job run by hand, from cron or in a container: signals, the report on stdout, an exit code that means something."""

from __future__ import annotations

import json
import signal
import sys
from typing import TYPE_CHECKING

from dlqbatch import logs, wiring
from dlqbatch.cli.configuration import settings_from
from dlqbatch.cli.failure import PARTIAL, failed
from dlqbatch.cli.progress import Progress
from dlqbatch.errors import DlqbatchError
from dlqbatch.runs.report import LEFT

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import FrameType

    from dlqbatch.runs.report import Report


def run_job(
    job: str | None,
    options: Mapping[str, object] | None = None,
    *,
    config: Path | None = None,
    dry_run: bool = False,
    as_json: bool = False,
) -> int:
    """The exit code; `job` None is the one that the settings name."""
    progress = Progress()
    occasion = wiring.Occasion(dry_run=dry_run, stopped=_on_signal(), progress=progress)
    try:
        settings = settings_from(options or {}, config)
        report = wiring.run(job or settings.job, settings, occasion)
    except DlqbatchError as error:
        progress.end()
        return failed(error, as_json=as_json)
    progress.end()
    show(report, as_json=as_json)
    return {"ok": 0, "partial": PARTIAL}.get(report.outcome, 1)


def _on_signal() -> _Stop:
    stop = _Stop()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop.ask)
    return stop


class _Stop:
    """Asks for the end at the first signal; a second Ctrl-C ends at once."""

    def __init__(self) -> None:
        self._asked = False

    def ask(self, number: int, _frame: FrameType | None) -> None:
        self._asked = True
        signal.signal(number, signal.SIG_DFL)

    def __call__(self) -> bool:
        return self._asked


def show(report: Report, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(report.as_dict()) + "\n")
        return
    kind = "dry run of " if report.dry_run else ""
    sys.stdout.write(
        f"{kind}{report.job}: {report.outcome}, stopped by {report.stopped_by}, "
        f"{report.elapsed_seconds:.2f} s, {report.per_second:g}/s\n"
    )
    for name, number in report.counts.items():
        if number or name == "got":
            sys.stdout.write(f"  {name.replace('_', ' '):<16}{number:>9}\n")
    for reason, number in report.reasons.items():
        sys.stdout.write(f"    {reason:<20}{number:>9}\n")
    for line in report.preview:
        why = f" ({line['reason']})" if line["reason"] else ""
        text = f"{line['queue']}: {line['event']} from {line['origin']} -> {line['decision'].replace('_', ' ')}{why}"
        sys.stdout.write(logs.plain(f"  {text} by exchange '{line['exchange']}', key '{line['key']}'") + "\n")
    unlisted = report.counts["got"] - report.counts[LEFT] - len(report.preview)
    if report.preview and unlisted > 0:
        sys.stdout.write(f"  … and {unlisted:,} more\n")
    if report.counts[LEFT] and not report.dry_run:
        sys.stdout.write("  note: what was left is still in its queue; docs/drain.md tells what each reason asks for\n")
    for warning in report.warnings:
        sys.stdout.write(logs.plain(f"  note: {logs.masked(warning)}") + "\n")
