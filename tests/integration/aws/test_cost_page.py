"""How many metrics docs/aws.md bills: those that the functions print in a month in which nothing fails."""

from __future__ import annotations

import os

from benchmarks import page
from benchmarks.prices import Prices
from dlqbatch import jobs
from dlqbatch.aws.metrics import figures
from dlqbatch.settings import load
from dlqbatch.store import migrate
from dlqbatch.topology.declare import apply_topology


def test_the_metrics_that_are_billed_are_those_that_the_jobs_print(broker_url: str, database_url: str) -> None:
    options = {"broker_url": broker_url, "database_url": database_url, "allow_empty_policy": True}
    settings = load(options, {"DLQBATCH_CONFIG": os.devnull})
    migrate.upgrade(database_url)
    apply_topology(settings)
    printed = 0
    for job in ("drain", "ingest", "lifecycle", "monitor", "retain"):
        printed += len(figures(jobs.run(job, settings, jobs.RunOptions()).as_dict()))
    price = Prices().metric_month
    row = f"| metrics that the functions above print | {printed} | ${price:.2f} | ${printed * price:.2f} |"
    assert row in page.PAGE.read_text(encoding="utf-8")
