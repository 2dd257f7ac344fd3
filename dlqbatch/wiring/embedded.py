"""A run's figures for CloudWatch, printed where a platform keeps what is printed."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from dlqbatch import logs

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logs.get(__name__)


def print_metrics(namespace: str, job: str, report: Mapping[str, object]) -> None:
    """One line to stdout; whatever goes wrong with it is logged, for it says nothing of the run."""
    from dlqbatch.cloud import emf  # noqa: PLC0415  (only for those who want metrics)

    try:
        line = emf.line(namespace, job, emf.figures(report))
    except Exception as error:  # noqa: BLE001  (a run is not judged by how it is measured)
        log.warning("the metrics of this run were not printed", why=str(error))
        return
    with suppress(OSError, ValueError, AttributeError):  # no stdout, or one that nobody reads
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
