"""`dlqbatch upgrade-check`: what an upgrade of dlqbatch or of the broker would meet."""

from __future__ import annotations

import sys

import typer

from dlqbatch import __version__
from dlqbatch.cli.options import AsJson, Settings
from dlqbatch.cli.printing import PARTIAL, print_json, remark
from dlqbatch.logs import plain

_BLOCKED = 1
_UNREACHABLE = 4


def upgrade_check(settings: Settings, *, as_json: AsJson = False) -> None:
    """Say what this version and the next release of the broker would meet here; it changes nothing.

    Run it with the new version, before it takes the place of the old one.

    dlqbatch upgrade-check
    """
    from dlqbatch.doctor.upgrade import Need, check_upgrade

    upgrade = check_upgrade(settings)
    if as_json:
        print_json(upgrade.as_dict())
    else:
        sys.stdout.write(plain(f"dlqbatch {__version__}; looked at {upgrade.diagnosis.looked_at()}") + "\n")
        for step in upgrade.steps:
            sys.stdout.write(plain(f"{step.need.value:<8} {step.of}  {step.where}") + "\n")
            sys.stdout.write(plain(f"         {step.what}") + "\n")
            sys.stdout.write(plain(f"    fix: {step.fix}") + "\n")
        is_ready = not (upgrade.has(Need.BLOCKED) or upgrade.has(Need.TO_DO))
        remark("nothing has to be done" if is_ready else "something has to be done")
    if upgrade.diagnosis.database.unreachable is not None:
        raise typer.Exit(_UNREACHABLE)
    raise typer.Exit(_BLOCKED if upgrade.has(Need.BLOCKED) else PARTIAL if upgrade.has(Need.TO_DO) else 0)
