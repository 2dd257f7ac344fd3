"""What the figures of docs/deploy.md are computed by."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import deployed, page
from benchmarks.prices import (
    CORE_AT_MB,
    Prices,
    Run,
    messages_a_month,
    of_container,
    of_function,
    runs_for_a_million,
    share_of,
)

ROOT = Path(__file__).parents[2]
ROUND = Prices(lambda_gb_second=0.001, lambda_million_requests=1.0, logs_gb=2.0)


def test_computing_takes_longer_on_a_part_of_a_core_and_waiting_does_not() -> None:
    assert Run(seconds=3.0, cpu_seconds=1.0).seconds_on(0.25) == pytest.approx(2.0 + 4.0)
    assert Run(seconds=3.0, cpu_seconds=1.0).seconds_on(2.0) == pytest.approx(3.0)
    # Threads may compute more than the clock has passed; nobody waits less than not at all.
    assert Run(seconds=1.0, cpu_seconds=1.5).seconds_on(1.0) == pytest.approx(1.5)
    assert (share_of(CORE_AT_MB), share_of(10 * CORE_AT_MB)) == (1.0, 1.0)
    assert share_of(512) == pytest.approx(0.2894, abs=1e-4)


def test_a_function_is_billed_by_memory_time_runs_and_log() -> None:
    run = Run(seconds=2.0, cpu_seconds=0.0, log_bytes=1024**3 / 1000, messages=5_000)
    assert runs_for_a_million(run) == 200
    bill = of_function(run, 200, 512, ROUND)
    assert bill.compute == pytest.approx(200 * 2.0 * 0.5 * 0.001)
    assert bill.requests == pytest.approx(200 / 1_000_000)
    assert bill.logs == pytest.approx(200 / 1000 * 2.0)
    assert bill.total == pytest.approx(bill.compute + bill.requests + bill.logs)


@pytest.mark.parametrize(("seconds", "billed"), [(0.001, 0.001), (0.0011, 0.002), (0.0, 0.0), (1.0, 1.0)])
def test_a_run_is_rounded_up_to_the_millisecond(seconds: float, billed: float) -> None:
    compute = of_function(Run(seconds, 0.0), 43_200, 1024, ROUND).compute
    assert compute == pytest.approx(43_200 * billed * 0.001)


def test_the_published_example_of_the_price_list_comes_out() -> None:
    """3 million runs of a second with 512 MB: 1.5 million GB-seconds, $25.00 of compute and $0.60 of requests."""
    bill = of_function(Run(1.0, 0.0), 3_000_000, 512, Prices())
    assert bill.compute == pytest.approx(25.0, abs=0.01)
    assert bill.requests == pytest.approx(0.60)


def test_a_container_costs_the_same_whatever_it_does() -> None:
    prices = Prices(container_core_hour=0.04, container_gb_hour=0.004)
    assert of_container(0.25, 512, prices) == pytest.approx((0.01 + 0.002) * 720)
    assert messages_a_month(Run(1.0, 0.5, messages=1_000), 0.25) == pytest.approx(1_000 / 2.5 * 720 * 3600)


def test_a_price_that_is_given_counts_and_nothing_follows_from_an_empty_run() -> None:
    assert Prices().but(logs_gb=0.63, lambda_gb_second=None) == Prices(logs_gb=0.63)
    with pytest.raises(ValueError, match="moved no message"):
        runs_for_a_million(Run(1.0, 1.0))


def test_results_take_the_place_of_the_results_before_and_of_nothing_else(tmp_path: Path) -> None:
    copy = tmp_path / "deploy.md"
    before = page.PAGE.read_text()
    copy.write_text(before)
    for name in ("cost", "scaling", "cold_start"):
        for text in ("old figures", "new figures"):
            page.put(name, [text, ""], copy)
    found = copy.read_text()
    assert "old figures" not in found
    assert found.count("new figures") == 3
    for line in before.splitlines():
        if line.startswith(("#", "<!--", "1.", "```")):
            assert line in found
    with pytest.raises(SystemExit, match="has no lines"):
        page.put("nothing", [], copy)


def test_an_option_for_each_price_is_shown(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "cost.py"), "--help"]
    shown = subprocess.run(
        command, env={**os.environ, "COLUMNS": "200"}, capture_output=True, text=True, check=True
    ).stdout
    for name in Prices.names():
        assert f"--{name.replace('_', '-')} USD" in shown


@pytest.mark.parametrize(
    ("rate", "runs"),
    [("rate(1 minute)", 43_200), ("rate(5 minutes)", 8_640), ("rate(2 hours)", 360), ("cron(0 3 * * ? *)", 30)],
)
def test_a_schedule_says_how_often_a_function_runs_in_a_month(rate: str, runs: int) -> None:
    assert deployed.runs_a_month(rate) == runs


def test_a_schedule_that_is_not_understood_is_no_bill_of_nothing() -> None:
    with pytest.raises(ValueError, match="not known here"):
        deployed.runs_a_month("cron(0 3 ? * MON *)")


def test_what_is_billed_is_what_the_template_deploys() -> None:
    found = {one.job: one for one in deployed.functions()}
    assert {job: one.runs_a_month for job, one in found.items()} == {
        **dict.fromkeys(("drain", "ingest", "lifecycle", "monitor"), 43_200),
        "retain": 30,
        "check": 8_640,
    }
    assert [job for job, one in found.items() if not one.is_on] == ["check"]
    assert found["retain"].memory_mb > found["drain"].memory_mb
    written = (ROOT / "deploy" / "aws" / "alarms.yml").read_text()
    fixed = deployed.fixed()
    assert fixed.alarms == written.count("Type: AWS::CloudWatch::Alarm")
    assert fixed.alarms_on_metrics == len(found)
    assert fixed.keys == 1


def test_every_figure_of_the_page_has_been_measured() -> None:
    assert "Not measured yet" not in page.PAGE.read_text(), "run the commands that docs/deploy.md names, with --write"
