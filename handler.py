"""The entry point: `handler(event, context)` for a cloud function, and the command line for everything else."""

from __future__ import annotations

from typing import Any


def handler(event: object, context: Any = None) -> dict[str, object]:
    """Run one job and return its report. A run that failed raises an error, so that the platform notices it."""
    from dlqbatch.cli import prepare_short_process  # noqa: PLC0415  (a failed import has to fail the event)

    prepare_short_process()
    from dlqbatch.cli.invoke import invoke  # noqa: PLC0415  (the command line does not need it)

    return invoke(event, context)


if __name__ == "__main__":
    from dlqbatch.cli import program

    program()
