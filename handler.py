"""The entry point: `handler(event, context)` for a cloud function, and the command line for everything else."""

from __future__ import annotations

from typing import Any


def handler(event: object, context: Any = None) -> dict[str, object]:
    """Run one job to its end and return its report; a job that failed raises, so that the platform notices."""
    from dlqbatch.cli import prepare_short_process  # noqa: PLC0415  (a module that cannot be loaded is an error of the event's)

    prepare_short_process()
    from dlqbatch.cli.invoke import invoke  # noqa: PLC0415  (a command line needs none of it)

    return invoke(event, context)


if __name__ == "__main__":
    from dlqbatch.cli import program

    program()
