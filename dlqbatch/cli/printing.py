"""What commands print: tables and reports for people, JSON for programs, remarks and errors on stderr.

A table never cuts or folds a value, because people copy ids, hashes and errors into the next command. A row that is
wider than the terminal takes several lines. In a pipe each row is one line.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from dlqbatch import logs
from dlqbatch.errors import DlqbatchError
from dlqbatch.logs import masked, plain

if TYPE_CHECKING:  # they need broker and database, which a help page does not
    from dlqbatch.jobs import Depth, Report
    from dlqbatch.messages.changes import Changes

PARTIAL: Final = 3
USAGE: Final = 2
UNEXPECTED: Final = 1
NOTHING: Final = 1
"""The exit code when nothing was found or changed."""
_MOST_CHANGES_SHOWN: Final = 50


def remark(text: str) -> None:
    sys.stderr.write(f"dlqbatch: {plain(text)}\n")


def print_json(value: object) -> None:
    sys.stdout.write(json.dumps(value, default=str) + "\n")


def print_lines(lines: Iterable[str]) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)


def print_changes(done: Changes, word: str, *, as_json: bool) -> int:
    """Print what became of each message, and return the exit code."""
    if as_json:
        print_json(done.as_dict())
    else:
        word = f"would be {word}" if done.dry_run else word
        # Every message that was not changed is shown, but only the first of those that were.
        well = [each for each in done.changes if each.is_done]
        rows = [
            {
                **({"asked": each.asked} if each.asked is not None else {}),
                "id": each.id,
                "before": each.before,
                "after": each.after,
                "done": ": ".join(filter(None, (word if each.is_done else "no", each.why))),
            }
            for each in [*well[:_MOST_CHANGES_SHOWN], *(each for each in done.changes if not each.is_done)]
        ]
        if rows:
            print_table(rows)
        if len(well) > _MOST_CHANGES_SHOWN:
            remark(f"and {len(well) - _MOST_CHANGES_SHOWN} more")
        undo = f"; `dlqbatch undo {done.action}` takes it back" if done.action is not None else ""
        remark(f"{done.done} {word}, {done.not_done} not{undo}")
    return NOTHING if not done.done else PARTIAL if done.not_done else 0


_GAP: Final = "  "
_INDENT: Final = "    "
_EMPTY_BELOW: Final = "-"
"""An empty value below the first line of its row, where no heading stands above it."""


def print_table(
    rows: Sequence[Mapping[str, object]],
    *,
    as_json: bool = False,
    columns: Sequence[str] = (),
    below: Sequence[str] = (),
    dropped: Sequence[str] = (),
) -> None:
    """Print rows under the names of their columns; control characters in a cell are made visible.

    Where a row is wider than the terminal, the columns of `below` move to a second line, one after the other, until
    the row fits. If that is not enough, those of `dropped` are left out, and then other columns move too, from the
    right; the first column stays. `columns` are needed only where there may be no rows.
    """
    if as_json:
        print_json([dict(row) for row in rows])
        return
    from rich.cells import cell_len
    from rich.console import Console
    from rich.text import Text

    columns = columns or tuple(rows[0])
    cells = [{column: "" if row[column] is None else plain(str(row[column])) for column in columns} for row in rows]
    widths = {column: max(map(cell_len, (column, *(row[column] for row in cells)))) for column in columns}
    console = Console(highlight=False)
    most = console.width if sys.stdout.isatty() else None
    first, moved = _layout(widths, most, below, dropped)

    def lines(row: Mapping[str, str]) -> list[str]:
        padded = _GAP.join(row[column] + " " * (widths[column] - cell_len(row[column])) for column in first)
        texts = [padded.rstrip()]
        for number, column in enumerate(moved):
            value = row[column] or _EMPTY_BELOW
            if number and most is not None and cell_len(texts[-1]) + len(_GAP) + cell_len(value) <= most:
                texts[-1] += _GAP + value
            else:
                texts.append(_INDENT + value)
        return texts

    with console.capture() as captured:
        for line in lines({column: column for column in columns}):
            console.print(Text(line, style="bold"), soft_wrap=True)
    sys.stdout.write(captured.get())
    sys.stdout.writelines(f"{line}\n" for row in cells for line in lines(row))


def _layout(
    widths: Mapping[str, int], most: int | None, below: Sequence[str], dropped: Sequence[str]
) -> tuple[list[str], list[str]]:
    """The columns of the first line of each row, and the columns below it."""
    first, moved = list(widths), set()
    for column in (*below, *dropped, *reversed(list(widths)[1:])):
        if most is None or sum(widths[each] for each in first) + len(_GAP) * (len(first) - 1) <= most:
            break
        if column in first:
            first.remove(column)
            if column not in dropped:
                moved.add(column)
    return first, [column for column in widths if column in moved]


_LONGEST_LINE: Final = 500
_QUEUES_SHOWN: Final = 20
_BY_QUEUE: Final = "queues"
"""The detail whose keys are names of queues, which are shown as they are."""
_LEFT: Final = "left"
_LEFT_WHERE: Final = {
    "drain": ("its queue", "docs/drain.md"),
    "ingest": ("its queue", "docs/ingest.md"),
    "lifecycle": ("the dead store", "docs/lifecycle.md"),
    "retain": ("the dead store", "docs/retention.md"),
    "replay": ("the dead store", "docs/replay.md"),
}


def print_report(report: Report) -> None:
    kind = "dry run of " if report.dry_run else ""
    sys.stdout.write(
        f"{kind}{report.job}: {report.outcome}, stopped by {report.stopped_by}, "
        f"{report.elapsed_seconds:.2f} s, {report.per_second:g}/s\n"
    )
    for name, number in report.counts.items():
        if number or name == "got":
            shown = "would be sent" if report.dry_run and name == "sent" else name.replace("_", " ")
            sys.stdout.write(f"  {shown:<16}{number:>9}\n")
    if report.reasons:
        sys.stdout.write("  by reason\n")
    for reason, number in report.reasons.items():
        sys.stdout.write(f"    {reason:<20}{number:>9}\n")
    _show_queues(report.queues)
    _show_details(report.details)
    for line in report.preview:
        why = f" ({line['reason']})" if line["reason"] else ""
        text = f"{line['queue']}: {line['event']} from {line['origin']} -> {line['decision'].replace('_', ' ')}{why}"
        sys.stdout.write(plain(f"  {text} by exchange '{line['exchange']}', key '{line['key']}'") + "\n")
    unlisted = report.counts["got"] - report.counts[_LEFT] - len(report.preview)
    if report.preview and unlisted > 0:
        sys.stdout.write(f"  … and {unlisted:,} more\n")
    if report.counts.get(_LEFT) and not report.dry_run and report.job in _LEFT_WHERE:
        where, page = _LEFT_WHERE[report.job]
        sys.stdout.write(f"  note: what was left is still in {where}; {page} tells what each reason asks for\n")
    for warning in report.warnings:
        sys.stdout.write(plain(f"  note: {masked(warning)}") + "\n")


def _show_queues(queues: Mapping[str, Depth]) -> None:
    """One line for each queue that held messages before or after the run, the deepest first."""
    held = [(queue, depth) for queue, depth in queues.items() if depth.found or depth.left]
    held.sort(key=lambda each: each[1].left or each[1].found, reverse=True)
    if held:
        sys.stdout.write(f"  {'by queue':<16}{'found':>9}{'left':>9}\n")
    for queue, depth in held[:_QUEUES_SHOWN]:
        left = "?" if depth.left is None else f"{depth.left}"
        sys.stdout.write(plain(f"    {depth.found:>21}{left:>9}  {queue}", _LONGEST_LINE) + "\n")
    if len(held) > _QUEUES_SHOWN:
        sys.stdout.write(f"    … and {len(held) - _QUEUES_SHOWN:,} more queues\n")


def _show_details(details: Mapping[str, object]) -> None:
    """One line for each detail that is not empty; a list of alerts is shown by their summaries."""
    for name, value in details.items():
        if isinstance(value, Mapping):
            flat = {key: _on_one_line(item) for key, item in value.items() if not isinstance(item, list)}
            for key, text in flat.items():
                if text:
                    shown = key if name == _BY_QUEUE else key.replace("_", " ")
                    sys.stdout.write(plain(f"  {shown:<24} {text}", _LONGEST_LINE) + "\n")
            summaries: dict[object, str] = {}
            for key, items in value.items():
                for item in items if isinstance(items, list) else ():
                    if isinstance(item, Mapping) and "summary" in item:
                        summaries.setdefault(item["summary"], key)  # an alert that has just fired is active too
            lines = (plain(f"  {key}: {summary}", _LONGEST_LINE) for summary, key in summaries.items())
            sys.stdout.writelines(f"{line}\n" for line in lines)
        else:
            sys.stdout.write(plain(f"  {name.replace('_', ' '):<24} {value}", _LONGEST_LINE) + "\n")


def _on_one_line(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_on_one_line(item)}" for key, item in value.items() if item)
    return "" if value is None else str(value)


_command: str | None = None
_RUNS: Final = frozenset({"drain", "ingest", "check", "lifecycle", "retain", "monitor", "replay"})
"""The commands that end with a report, also when they fail."""


def name_job(job: str) -> None:
    """Remember what this process does, for the line that says why it has failed."""
    global _command  # noqa: PLW0603  (a process runs one command, and its watchdog has to know which)
    _command = job


def print_error(error: DlqbatchError, *, as_json: bool) -> int:
    """Say why the command has failed, and return the exit code."""
    print_failure(type(error).__name__, str(error), error.exit_code, as_json=as_json)
    return error.exit_code


def print_unexpected_error(error: Exception, *, as_json: bool) -> int:
    """Log an error that no code of ours raises, with its trace, and return the exit code. Passwords are masked."""
    if not logging.root.handlers:
        logs.configure()
    logs.get(__name__).error("unexpected error", failure=error)
    text = f"an unexpected error, {type(error).__name__}: {error}. What was not settled is back in its queue."
    print_failure(type(error).__name__, text, UNEXPECTED, as_json=as_json)
    return UNEXPECTED


def print_failure(kind: str, text: str, code: int, *, as_json: bool) -> None:
    """Write it to stderr in the form of the logs, as text or as a line of JSON; with `as_json` also to stdout."""
    text = masked(text)
    if not logging.root.handlers:
        logs.configure(style=_stated_format())
    if logs.is_json():
        fields = {"job": _command, "error": kind, "exit_code": code, "message": text}
        sys.stderr.write(logs.json_line("error", "failed", __name__, fields) + "\n")
    else:
        for line in text.splitlines():
            sys.stderr.write(f"dlqbatch: {plain(line)}\n")
    if as_json:
        failure: dict[str, object] = {"outcome": "failed", "error": {"type": kind, "message": text}}
        if _command in _RUNS:
            # A run that ends with an error of ours has taken nothing. After an unexpected error that is not known.
            counts = {"got": 0} if code != UNEXPECTED else {}
            failure = {"job": _command, "outcome": "failed", "stopped_by": "failure", "counts": counts, **failure}
        with suppress(OSError):  # it may be stdout that failed
            sys.stdout.write(json.dumps(failure) + "\n")


def _stated_format() -> logs.Format:
    """The form of the logs for an error that comes before the settings are read, such as a mistyped option."""
    try:
        from dlqbatch.settings import stated_format
    except ImportError:  # the package that is missing may be one that the settings need
        return "auto"
    return stated_format()
