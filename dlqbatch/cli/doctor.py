"""`dlqbatch doctor`: print the findings, the worst first, each with the command that mends it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import typer

from dlqbatch.cli.options import AsJson, Settings
from dlqbatch.cli.printing import print_json, remark
from dlqbatch.doctor.findings import Finding, Severity
from dlqbatch.logs import plain

if TYPE_CHECKING:  # it needs broker and database, which a help page does not
    from dlqbatch.doctor.job import Diagnosis

_SERIOUS: Final = 1
"""The exit code when something serious was found."""


def doctor(settings: Settings, *, as_json: AsJson = False) -> None:
    """Look at the broker and the database, and name what will bite, with the command that puts it right.

    It changes nothing.

    dlqbatch doctor
    """
    from dlqbatch.doctor.job import diagnose

    diagnosis = diagnose(settings)
    if as_json:
        print_json(diagnosis.as_dict())
    else:
        for line in _lines(diagnosis):
            sys.stdout.write(line + "\n")
        remark(", ".join(_counted(severity, diagnosis.count(severity)) for severity in Severity))
    raise typer.Exit(_SERIOUS if diagnosis.count(Severity.SERIOUS) else 0)


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    yield plain(f"looked at {diagnosis.looked_at()}")
    for finding in diagnosis.findings:
        yield from _finding(finding)
    if not diagnosis.findings:
        yield "nothing found"


def _finding(finding: Finding) -> Iterator[str]:
    # The fix has a line of its own, so that a triple click takes it and a program finds it.
    yield plain(f"{finding.severity.value:<8} {finding.code.value}  {finding.where}")
    yield plain(f"         {finding.what}")
    yield plain(f"    fix: {finding.fix}")


def _counted(severity: Severity, count: int) -> str:
    ending = "" if severity is Severity.SERIOUS or count == 1 else "s"
    return f"{count} {severity.value}{ending}"
