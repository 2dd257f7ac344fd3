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

    found = diagnose(settings)
    if as_json:
        print_json(found.as_dict())
    else:
        for line in _lines(found):
            sys.stdout.write(line + "\n")
        remark(", ".join(f"{found.count(severity)} {_word(severity, found.count(severity))}" for severity in Severity))
    raise typer.Exit(_SERIOUS if found.count(Severity.SERIOUS) else 0)


def _lines(found: Diagnosis) -> Iterator[str]:
    yield plain(f"looked at {found.looked_at()}")
    for finding in found.findings:
        yield from _finding(finding)
    if not found.findings:
        yield "nothing found"


def _finding(finding: Finding) -> Iterator[str]:
    # The fix has a line of its own, so that a triple click takes it and a program finds it.
    yield plain(f"{finding.severity.value:<8} {finding.code.value}  {finding.where}")
    yield plain(f"         {finding.what}")
    yield plain(f"    fix: {finding.fix}")


def _word(severity: Severity, count: int) -> str:
    if severity is Severity.SERIOUS:
        return "serious"
    return severity.value if count == 1 else f"{severity.value}s"
