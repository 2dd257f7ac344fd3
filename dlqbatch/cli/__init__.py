"""The command line: nothing but parsing and printing."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; without arguments, one run of the job that the settings name."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if not given:
            # A cold start from cron or a container: the parser and its tables would double the time it takes.
            from dlqbatch.cli.job import run_job  # noqa: PLC0415

            return run_job(None)
        from dlqbatch.cli.commands import run_command  # noqa: PLC0415

        # `handler.py --json` is a drain as well, as `handler.py` alone is.
        is_for_drain = given[0].startswith("-") and given[0] not in {"--help", "-h", "--version"}
        return run_command(["drain", *given] if is_for_drain else given)
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001  (the last to see it: logged with its trace, never with a password)
        from dlqbatch.cli.failure import unexpected  # noqa: PLC0415

        return unexpected(error, as_json="--json" in given)
