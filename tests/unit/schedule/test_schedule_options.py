"""When the settings say that a job runs: what is understood, what is refused, and which times come of it."""

from __future__ import annotations

import itertools
import os
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from dlqbatch.errors import SettingsError
from dlqbatch.schedule.due import due_jobs
from dlqbatch.schedule.scheduler import Scheduler
from dlqbatch.settings import load
from dlqbatch.settings.schedule_options import cron_trigger

if TYPE_CHECKING:
    from dlqbatch.schedule.due import Due
    from dlqbatch.settings import Settings

NOW = datetime(2026, 3, 4, 10, 20, 30, tzinfo=UTC)  # a Wednesday


def settings(**given: str) -> Settings:
    return load(given, {"DLQBATCH_CONFIG": os.devnull})


def problem(**given: str) -> str:
    with pytest.raises(SettingsError) as raised:
        settings(**given)
    return str(raised.value)


def due(**given: str) -> dict[str, Due]:
    return {one.job: one for one in due_jobs(settings(**given), NOW)}


def days(expression: str, number: int, zone: str = "UTC", now: datetime = NOW) -> list[str]:
    trigger, times = cron_trigger(expression, zone), [now]
    for _ in range(number):
        times.append(trigger.get_next_fire_time(times[-1] if times[1:] else None, times[-1]))
    return [f"{time:%a %d %H:%M}" for time in times[1:]]


def test_the_defaults_are_those_of_the_design() -> None:
    found = due()
    assert {job: one.when for job, one in found.items()} == {
        "drain": "60s",
        "ingest": "30s",
        "lifecycle": "30s",
        "monitor": "60s",
        "retain": "0 3 * * *",
    }
    assert found["retain"].first == datetime(2026, 3, 5, 3, 0, tzinfo=UTC)
    assert found["retain"].period == timedelta(days=1)


def test_replay_is_due_where_a_database_is_named_in_which_a_plan_can_be_released() -> None:
    assert due(database_url="sqlite:////nowhere.sqlite3")["replay"].when == "30s"
    assert due(schedule_replay="5s")["replay"].when == "5s"
    with pytest.raises(SettingsError, match="replay"):
        Scheduler(settings(schedule_replay="5s", schedule_ingest="off", schedule_lifecycle="off"), {})


def test_an_interval_is_due_at_once_and_then_on_its_beat() -> None:
    found = due(schedule_drain="90s")["drain"]
    assert found.times(3) == [NOW, NOW + timedelta(seconds=90), NOW + timedelta(seconds=180)]


def test_jobs_on_intervals_do_not_all_start_on_one_beat() -> None:
    """Each start is a cold Python: on a quarter of a core, four at once would keep each other waiting."""
    found = due()
    beats = {job: one.times(4) for job, one in found.items() if one.is_interval}
    assert [times[0] - NOW for times in beats.values()] == [timedelta(seconds=5 * number) for number in range(4)]
    moments = sorted(moment for times in beats.values() for moment in times)
    assert min(later - earlier for earlier, later in itertools.pairwise(moments)) >= timedelta(seconds=5)
    # However short the intervals are, each job is due within its own.
    found = due(schedule_drain="1s", schedule_ingest="2s", schedule_lifecycle="off", schedule_monitor="4h")
    firsts = [found[job].first - NOW for job in ("drain", "ingest", "monitor")]
    assert firsts == [number * (timedelta(seconds=1) / 3) for number in range(3)]
    assert due(schedule_retain="1h")["retain"].first == NOW + timedelta(seconds=20)


def test_jitter_never_puts_a_start_off_past_the_next_one() -> None:
    found = due(schedule_drain="1s", schedule_ingest="5m", schedule_jitter="1m")
    assert found["drain"].jitter == timedelta(seconds=0.5)
    assert found["ingest"].jitter == timedelta(minutes=1)


def test_off_is_off() -> None:
    assert "drain" not in due(schedule_drain="Off")
    assert due(**{f"schedule_{job}": "off" for job in ("drain", "ingest", "lifecycle", "monitor", "retain")}) == {}


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("0 3 * * 0", ["Sun 08 03:00", "Sun 15 03:00"]),
        ("0 3 * * 7", ["Sun 08 03:00", "Sun 15 03:00"]),
        ("0 3 * * 1", ["Mon 09 03:00", "Mon 16 03:00"]),
        ("0 3 * * fri-mon", ["Fri 06 03:00", "Sat 07 03:00", "Sun 08 03:00", "Mon 09 03:00", "Fri 13 03:00"]),
        ("0 3 * * 1-5", ["Thu 05 03:00", "Fri 06 03:00", "Mon 09 03:00"]),
        ("0 3 * * */3", ["Sat 07 03:00", "Sun 08 03:00", "Wed 11 03:00"]),
        ("0 0 13 * 5", ["Fri 06 00:00", "Fri 13 00:00", "Fri 20 00:00"]),
        ("*/20 * * * *", ["Wed 04 10:40", "Wed 04 11:00"]),
    ],
)
def test_a_cron_expression_means_what_it_means_to_cron(expression: str, expected: list[str]) -> None:
    assert days(expression, len(expected)) == expected


def test_cron_goes_by_the_time_zone_of_the_settings() -> None:
    found = due(schedule_retain="0 3 * * *", time_zone="Europe/Berlin")["retain"]
    assert found.first.astimezone(UTC) == datetime(2026, 3, 5, 2, 0, tzinfo=UTC)
    across = [time.astimezone(UTC).hour for time in found.times(30)]  # daylight saving begins on the 29th
    assert (across[0], across[-1]) == (2, 1)


@pytest.mark.parametrize(
    "value",
    [
        "60",
        "0s",
        "999ms",
        "-1s",
        "every minute",
        "* * * *",
        "* * * * * *",
        "@daily",
        "400d",
        "\x1b[31m * * * *",
        "0x1s",
    ],
)
def test_what_is_no_time_is_refused_with_what_it_must_be(value: str) -> None:
    said = problem(schedule_drain=value)
    assert "schedule-drain" in said
    assert "\x1b" not in said


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("99 * * * *", "maximum value"),
        ("* * * * 8", "no day of the week"),
        ("* * * * monday", "no day of the week"),
        ("0 0 31 2 *", "never comes"),
        ("*/0 * * * *", "Increment"),
        ("* * * * 1/0", "steps of 0"),
    ],
)
def test_what_is_no_cron_expression_is_refused_with_the_reason(value: str, why: str) -> None:
    assert why in problem(schedule_retain=value)


@pytest.mark.parametrize(
    "value", ["127.0.0.1", "8421", "host:port", "http://127.0.0.1:1", "a:b@c:1", "h:99999", "h:1/x"]
)
def test_what_is_no_address_is_refused(value: str) -> None:
    assert "health-address" in problem(health_address=value)


@pytest.mark.parametrize("value", ["127.0.0.1:8421", "[::1]:8421", "0.0.0.0:0", "off"])
def test_addresses_are_understood(value: str) -> None:
    assert settings(health_address=value).health_address == value


@pytest.mark.parametrize(
    "given",
    [
        {"trigger_depth": "-1"},
        {"max_workers": "0"},
        {"max_workers": "65"},
        {"trigger_interval": "0s"},
        {"trigger_interval": "5"},
        {"schedule_jitter": "2h"},
    ],
)
def test_numbers_out_of_bounds_are_refused(given: dict[str, str]) -> None:
    assert "must be" in problem(**given)


def test_a_clock_that_was_set_back_holds_up_no_interval() -> None:
    given = settings(schedule_drain="30s", database_url="sqlite:////nowhere.sqlite3")
    scheduler = Scheduler(given, {})
    later = datetime.now(UTC) + timedelta(hours=1)
    for job in ("drain", "retain"):
        scheduler._clock.modify_job(job, next_run_time=later)
    scheduler.keep_time()
    found = {job: scheduler._clock.get_job(job).next_run_time for job in ("drain", "retain")}
    assert found["drain"] <= datetime.now(UTC)
    assert found["retain"] == later
