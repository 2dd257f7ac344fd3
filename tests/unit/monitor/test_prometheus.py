"""The metrics as Prometheus reads them; promtool itself checks the text and the rules."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread

import pytest
from empty_metrics import NOW, QUIET
from program import HANGS_AFTER, ROOT

from dlqbatch import __version__
from dlqbatch.aws.secrets import CurrentSettings
from dlqbatch.lifecycle.return_checks import UnprovenRetries
from dlqbatch.monitor.alert_rules import (
    BACKLOG,
    HIGH_INGESTION,
    LOW_RESOLUTION,
    QUEUE_DEEP,
    RETENTION,
    RETRIES_UNPROVEN,
    RUNS_BOUNDED,
    Notice,
    Severity,
    Thresholds,
)
from dlqbatch.monitor.metrics import EventFigures, LastRun, Tops, queue_depths, report_of_depths
from dlqbatch.monitor.prometheus import FileNotWritten, render, write
from dlqbatch.monitor.queue_depths import Reading
from dlqbatch.schedule.health import Figures
from dlqbatch.schedule.processes import LastRun as EndedRun
from dlqbatch.schedule.processes import Tally
from dlqbatch.schedule.scaling import Seen
from dlqbatch.settings import load
from dlqbatch.store.states import NEW_GROUP

ODD = 'back\\slash "quoted"\nnew line \x1b[31m \u2028 ä'
BUSY = replace(
    QUIET,
    states={"pending": 3, "failed": 2},
    backlog=5,
    overdue={"resolved": 4, "failed": 0},
    outcomes={"resolved": 1, "failed": 3, "manual": 0},
    seconds_in_store=12.5,
    errors=Tops(((ODD, 4), ("x" * 300, 2), ("x" * 299 + "y", 1)), 7),
    events=(EventFigures("orders.created", 2, 6),),
    oldest_waiting=NOW,
    sent=5,
    oldest_sent=NOW - timedelta(hours=1),
    unproven=(UnprovenRetries(ODD, 4, NOW, False, "it has no consumer", "q", 4, 0, 0, 0, NOW),),
    runs={"drain": {"runs": 2, "got": 9, "dead_lettered": 1, "delayed": 3}},
    queues=queue_depths([report_of_depths(NOW, {"retry-queue": 7, ODD: 8, "x" * 300: 1, "x" * 299 + "y": 2})]),
    bounds_in_a_row={"drain": 2},
    last_runs=(LastRun("drain", NOW - timedelta(seconds=3), NOW, "partial", "time", {"got": 9}),),
)
STANDS = Notice(1, NEW_GROUP, "f" * 16, Severity.WARNING, "s", 1, None, NOW)


def promtool(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *arguments], input=given, capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.promtool
@pytest.mark.parametrize("metrics", [QUIET, BUSY])
def test_promtool_finds_nothing_wrong(metrics: object) -> None:
    checked = promtool("check", "metrics", given=render(metrics, [STANDS]))
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_every_number_has_its_name_and_labels() -> None:
    lines = render(BUSY, [STANDS, STANDS]).splitlines()
    for line in (
        'dlqbatch_messages{state="pending"} 3',
        "dlqbatch_backlog 5",
        "dlqbatch_resolution_ratio 0.25",
        "dlqbatch_seconds_in_store 12.5",
        'dlqbatch_errors_last_day{error_type="other"} 7',
        'dlqbatch_dead_last_day{event="orders.created"} 2',
        'dlqbatch_retries_before_death_last_day{event="orders.created"} 6',
        'dlqbatch_alerts_active{alert="NewGroupNeedsPerson"} 2',
        'dlqbatch_runs_last_hour{job="drain",count="got"} 9',
        'dlqbatch_last_run_ok{job="drain"} 0',
        'dlqbatch_last_run_duration_seconds{job="drain"} 3.0',
        f"dlqbatch_measured_timestamp_seconds {NOW.timestamp()}",
        'dlqbatch_queue_depth{queue="retry-queue"} 7',
        f'dlqbatch_queue_depth_timestamp_seconds{{queue="retry-queue"}} {NOW.timestamp()}',
        'dlqbatch_runs_at_bound_in_a_row{job="drain"} 2',
    ):
        assert line in lines
    assert all(line.startswith(("# HELP dlqbatch_", "# TYPE dlqbatch_", "dlqbatch_")) for line in lines)


def test_odd_names_are_escaped_and_those_cut_alike_are_one() -> None:
    errors = [line for line in render(BUSY, []).splitlines() if line.startswith("dlqbatch_errors_last_day{")]
    assert len(errors) == 3
    assert r'error_type="back\\slash \"quoted\"\\nnew line \\x1b[31m \\u2028 ä"} 4' in errors[0]
    assert errors[1].endswith('…"} 3')


def test_what_is_not_known_is_left_out() -> None:
    text = render(QUIET, [])
    for name in ("resolution_ratio", "seconds_in_store", "replay_success_ratio", "oldest_waiting"):
        assert name not in text


def test_the_file_is_replaced_whole_and_readable_by_all(tmp_path: Path) -> None:
    file = tmp_path / "dlqbatch.prom"
    old, new = "old\n" * 50_000, "new\n" * 50_000
    write(file, old)
    stop, seen = Event(), set()

    def look() -> None:
        while not stop.is_set():
            seen.add(file.read_text(encoding="utf-8"))

    reader = Thread(target=look)
    reader.start()
    for _ in range(20):
        write(file, new)
        write(file, old)
    stop.set()
    reader.join(HANGS_AFTER)
    assert seen <= {old, new}
    assert file.stat().st_mode & 0o777 == 0o644
    assert [entry.name for entry in tmp_path.iterdir()] == ["dlqbatch.prom"]


def test_a_file_that_cannot_be_written_is_told_and_nothing_stays_behind(tmp_path: Path) -> None:
    with pytest.raises(FileNotWritten, match="No such file or directory"):
        write(tmp_path / "no such folder" / "x.prom", "text")
    (tmp_path / "folder.prom").mkdir()
    with pytest.raises(FileNotWritten, match="could not be written to"):
        write(tmp_path / "folder.prom", "text")
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder.prom"]


def of_the_scheduler() -> str:
    """Its own figures, of one that cannot read its database."""
    nowhere = load({"database_url": "sqlite:////nowhere/db.sqlite3"}, {"DLQBATCH_CONFIG": "/dev/null"})
    seen = Seen(reachable=False, since=NOW, reading=Reading(NOW, {"dlq-queue": 3, ODD: 1}, {}))
    figures = Figures(CurrentSettings(nowhere, None), lambda _: 0, lambda: seen)
    drain, monitor = Tally(last_success=NOW), Tally()
    for seconds, report in (
        (0.3, {"counts": {"got": 3, "delayed": 2, "left": 1}, "reasons": {"no queue": 1}}),
        (120.5, {"counts": {"got": 2, "delayed": 2, "left": 0}, "reasons": {}}),
        (-1.0, {}),
    ):
        drain.add(EndedRun("drain", NOW, NOW + timedelta(seconds=seconds), 0, report))
    monitor.add(EndedRun("monitor", NOW, NOW, 0, {"counts": {"got": 0, "delayed": 0}}))
    return figures.text({"drain": drain, "monitor": monitor}, is_well=True)


def test_a_scheduler_adds_up_what_its_runs_report() -> None:
    lines = of_the_scheduler().splitlines()
    assert [
        line for line in lines if line.startswith(("dlqbatch_messages_total", "dlqbatch_message_reasons_total"))
    ] == [
        'dlqbatch_messages_total{job="drain",decision="delayed"} 4',
        'dlqbatch_messages_total{job="drain",decision="left"} 1',
        'dlqbatch_message_reasons_total{job="drain",reason="no queue"} 1',
    ]
    times = [line for line in lines if line.startswith("dlqbatch_run_seconds") and '"drain"' in line]
    numbers = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in times}
    assert numbers['dlqbatch_run_seconds_bucket{job="drain",le="0.25"}'] == 1
    assert numbers['dlqbatch_run_seconds_bucket{job="drain",le="0.5"}'] == 2
    assert numbers['dlqbatch_run_seconds_bucket{job="drain",le="120"}'] == 2
    assert numbers['dlqbatch_run_seconds_bucket{job="drain",le="+Inf"}'] == 3
    assert numbers['dlqbatch_run_seconds_sum{job="drain"}'] == 120.8
    assert numbers['dlqbatch_run_seconds_count{job="drain"}'] == 3


def queries_of_the_dashboard() -> list[str]:
    dashboard = json.loads((Path(ROOT) / "deploy" / "grafana.json").read_text(encoding="utf-8"))
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def test_the_dashboard_asks_for_metrics_and_labels_that_there_are() -> None:
    text = of_the_scheduler() + render(BUSY, [STANDS])
    samples = re.findall(r"^(dlqbatch_\w+)(?:{(.*)})? ", text, re.MULTILINE)
    labels: dict[str, set[str]] = {}
    for name, written in samples:
        labels.setdefault(name, set()).update(re.findall(r'(\w+)="', written))
    for query in queries_of_the_dashboard():
        (name,) = re.findall(r"dlqbatch_\w+", query)
        wanted = {label for written in re.findall(r"by \((.*?)\)", query) for label in written.split(", ")}
        # Prometheus renames the label `job`, unless it is told to honour ours.
        assert wanted - {"exported_job"} <= labels[name], query


@pytest.mark.promtool
def test_prometheus_understands_the_queries_of_the_dashboard(tmp_path: Path) -> None:
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries_of_the_dashboard())]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    checked = promtool("check", "rules", str(file))
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.promtool
def test_promtool_finds_nothing_wrong_with_those_of_the_scheduler() -> None:
    checked = promtool("check", "metrics", given=of_the_scheduler())
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_a_scheduler_tells_its_version_and_what_it_has_seen_of_the_broker_also_without_a_database() -> None:
    lines = of_the_scheduler().splitlines()
    for line in (
        f'dlqbatch_build_info{{version="{__version__}"}} 1',
        "dlqbatch_schedule_broker_reachable 0",
        "dlqbatch_schedule_store_read 0",
        'dlqbatch_queue_depth{queue="dlq-queue"} 3',
        f'dlqbatch_queue_depth_timestamp_seconds{{queue="dlq-queue"}} {NOW.timestamp()}',
    ):
        assert line in lines


@pytest.mark.promtool
def test_the_rules_do_what_their_tests_say() -> None:
    for done in (
        promtool("check", "rules", "deploy/prometheus-rules.yml"),
        promtool("test", "rules", "deploy/prometheus-rules-test.yml"),
    ):
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_rules_have_the_thresholds_of_the_settings_and_names_that_are_written() -> None:
    rules = (Path(ROOT) / "deploy" / "prometheus-rules.yml").read_text(encoding="utf-8")
    expressions = dict(re.findall(r"- alert: (\w+)\n(?: +#.*\n)* +expr: (.+)", rules))
    settings = load({}, {"DLQBATCH_CONFIG": "/dev/null"})
    defaults = Thresholds()
    assert (settings.alert_ingestion_per_minute, settings.alert_backlog) == (100, 10_000)
    assert Thresholds(
        settings.alert_ingestion_per_minute,
        settings.alert_backlog,
        settings.alert_resolution_rate,
        settings.alert_resolution_minimum,
    ) == replace(defaults)
    assert settings.alert_overdue == timedelta(hours=36)
    assert expressions[HIGH_INGESTION] == f"dlqbatch_ingested_per_minute > {defaults.ingestion_per_minute:g}"
    assert expressions[BACKLOG] == f"dlqbatch_backlog > {defaults.backlog}"
    outcomes = "sum without (outcome) (dlqbatch_outcomes_last_hour)"
    assert expressions[LOW_RESOLUTION] == (
        f"dlqbatch_resolution_ratio < {defaults.resolution_rate:g} and {outcomes} >= {defaults.resolution_minimum}"
    )
    assert expressions[RETENTION] == "sum without (state) (dlqbatch_overdue) > 0"
    assert expressions[QUEUE_DEEP] == f"dlqbatch_queue_depth > {defaults.queue_depth}"
    minutes = settings.alert_queue_deep_for / timedelta(minutes=1)
    assert re.search(rf"alert: {QUEUE_DEEP}\n(?:.*\n){{2}} +for: {minutes:g}m\n", rules)
    assert expressions[RUNS_BOUNDED] == f"dlqbatch_runs_at_bound_in_a_row >= {defaults.bounded_runs}"
    given = (settings.alert_queue_depth, settings.alert_queue_deep_for, settings.alert_bounded_runs)
    assert given == (defaults.queue_depth, defaults.queue_deep_for, defaults.bounded_runs)
    age = "dlqbatch_measured_timestamp_seconds - dlqbatch_oldest_sent_timestamp_seconds"
    assert expressions[RETRIES_UNPROVEN] == f"{age} > {defaults.unproven_after.total_seconds():g}"
    assert settings.alert_unproven_after == defaults.unproven_after
    assert expressions[NEW_GROUP] == f'dlqbatch_alerts_active{{alert="{NEW_GROUP}"}} > 0'
    written = set(re.findall(r"^(dlqbatch_\w+)", render(BUSY, [STANDS]) + of_the_scheduler(), re.MULTILINE))
    assert set(re.findall(r"dlqbatch_\w+", " ".join(expressions.values()))) <= written
    severities = dict(re.findall(r"- alert: (\w+)\n(?:.*\n)*?\s+severity: (\w+)", rules))
    assert severities[BACKLOG] == severities[QUEUE_DEEP] == "critical"
    assert severities[RUNS_BOUNDED] == "warning"
    assert {severities[name] for name in (HIGH_INGESTION, LOW_RESOLUTION, RETENTION, NEW_GROUP, RETRIES_UNPROVEN)} == {
        "warning"
    }
