"""The entry points: `handler` and `console` for cloud functions, and the command line for everything else."""

from __future__ import annotations

import os
from typing import Any


def handler(event: object, context: Any = None) -> dict[str, object]:
    """Run one job and return its report. A run that failed raises an error, so that the platform notices it."""
    from dlqbatch.cli import prepare_short_process  # noqa: PLC0415  (a failed import has to fail the event)

    prepare_short_process()
    from dlqbatch.cli.invoke import invoke  # noqa: PLC0415  (the command line does not need it)

    return invoke(event, context)


def console(event: Any, _context: Any = None) -> dict[str, object]:
    """Answer one request to the console: of a function URL, or of an HTTP API of API Gateway."""
    from dlqbatch.console.function import answer  # noqa: PLC0415  (no job needs it)

    return answer(event)


def _load_ahead() -> None:
    """Load what the function's job needs while Lambda starts it: before its time is counted, and with more CPU."""
    try:
        from dlqbatch.cli import prepare_short_process  # noqa: PLC0415  (only a cloud function loads ahead)

        prepare_short_process()
        from dlqbatch.cli.invoke import load_ahead  # noqa: PLC0415  (only a cloud function loads ahead)

        load_ahead(os.environ)
    except Exception:  # noqa: BLE001  (the first event meets it again, and reports it)
        return


if __name__ == "__main__":
    from dlqbatch.cli import program

    program()
elif "AWS_LAMBDA_FUNCTION_NAME" in os.environ:
    _load_ahead()
