from __future__ import annotations

from datetime import UTC, datetime, timedelta, tzinfo
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.errors import SettingsError
from dlqbatch.lifecycle.backoff_and_off_peak import Options, next_off_peak, next_retry, zone
from dlqbatch.lifecycle.strategy import LoadLimits
from dlqbatch.store.states import Strategy

NOW = datetime(2026, 2, 11, 12, tzinfo=UTC)
BERLIN, NEW_YORK, LORD_HOWE = ZoneInfo("Europe/Berlin"), ZoneInfo("America/New_York"), ZoneInfo("Australia/Lord_Howe")
ZONES = st.sampled_from(
    [
        "UTC",
        "Europe/Berlin",
        "America/New_York",
        "America/Sao_Paulo",
        "Africa/Cairo",
        "Asia/Kathmandu",
        "Asia/Beirut",
        "Australia/Lord_Howe",
        "Pacific/Apia",
    ]
).map(ZoneInfo)
TIMES = st.datetimes(datetime(2005, 1, 1), datetime(2036, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001  (Hypothesis adds the zone)
HOURS = (2, 3, 4)


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def local(text: str, where: tzinfo, fold: int = 0) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=where, fold=fold)


@pytest.mark.parametrize(("retries", "minutes"), [(0, 1), (1, 5), (2, 15), (3, 30), (4, 60), (5, 60), (99, 60)])
def test_immediate_waits_longer_each_time(retries: int, minutes: int) -> None:
    assert next_retry(Strategy.IMMEDIATE, retries, NOW, Options()) == NOW + timedelta(minutes=minutes)


@given(st.integers(0, 10), st.floats(0, 1))
def test_conditional_is_as_patient_as_immediate_and_manual_never_comes(retries: int, jitter: float) -> None:
    options = Options(recheck=timedelta(minutes=7))
    both = (Strategy.IMMEDIATE, Strategy.CONDITIONAL)
    immediate, conditional = (next_retry(each, retries, NOW, options, jitter=jitter) for each in both)
    assert conditional == immediate
    assert next_retry(Strategy.MANUAL, 0, NOW, options) is None


@pytest.mark.parametrize(
    ("now", "where", "due"),
    [
        ("2026-02-11T12:00", UTC, "2026-02-12T02:00"),
        ("2026-02-11T01:59:59.999999", UTC, "2026-02-11T02:00"),
        ("2026-02-11T02:00", UTC, "2026-02-11T03:00"),
        ("2026-02-11T04:00", UTC, "2026-02-12T02:00"),
        ("2026-07-01T12:00", BERLIN, "2026-07-02T00:00"),
        ("2026-01-01T12:00", BERLIN, "2026-01-02T01:00"),
        # Spring: in Berlin 2:00 to 3:00 is left out on 29 March.
        ("2026-03-29T00:30", BERLIN, "2026-03-29T01:00"),
        # Autumn: 2:00 comes twice on 25 October, at 0:00 and 1:00 UTC; then 3:00 at 2:00 UTC.
        ("2026-10-24T12:00", BERLIN, "2026-10-25T00:00"),
        ("2026-10-25T00:00", BERLIN, "2026-10-25T02:00"),
        ("2026-10-25T01:30", BERLIN, "2026-10-25T02:00"),
        # New York leaves out 2:00 on 8 March.
        ("2026-03-08T06:30", NEW_YORK, "2026-03-08T07:00"),
        # Lord Howe leaves out half an hour: 2:00 becomes 2:30 on 4 October.
        ("2026-10-03T15:00", LORD_HOWE, "2026-10-03T16:00"),
        # Apia had no 30 December 2011.
        ("2011-12-29T15:00", ZoneInfo("Pacific/Apia"), "2011-12-30T12:00"),
    ],
)
def test_scheduled_takes_the_next_off_peak_hour_that_exists(now: str, where: tzinfo, due: str) -> None:
    assert next_retry(Strategy.SCHEDULED, 0, utc(now), Options(zone=where)) == utc(due)


def test_an_hour_left_out_waits_for_the_next_night_if_it_is_the_only_one() -> None:
    assert next_off_peak(utc("2026-03-29T00:00"), (2,), BERLIN) == local("2026-03-30T02:00", BERLIN)


def test_an_hour_that_comes_twice_fires_once() -> None:
    fired, now = [], utc("2026-10-24T22:30")
    while (now := next_off_peak(now, HOURS, BERLIN)) < utc("2026-10-25T12:00"):
        fired.append(now.astimezone(BERLIN).hour)
    assert fired == [2, 3, 4]


@given(TIMES, ZONES, st.sets(st.integers(0, 23), min_size=1, max_size=4))
def test_an_off_peak_hour_lies_ahead_is_one_of_them_and_is_the_first(
    now: datetime, where: ZoneInfo, hours: set[int]
) -> None:
    due = next_off_peak(now, tuple(hours), where)
    wall = due.astimezone(where)
    assert due > now
    assert due.tzinfo is UTC
    assert wall.hour in hours
    assert (wall.minute, wall.second, wall.microsecond, wall.fold) == (0, 0, 0, 0)
    # No full hour between now and then would have done: every quarter is tried, for zones that are off by one.
    probe = now.replace(minute=now.minute // 15 * 15, second=0, microsecond=0)
    while (probe := probe + timedelta(minutes=15)) < due:
        seen = probe.astimezone(where)
        assert seen.hour not in hours or seen.minute != 0 or seen.fold == 1


@given(st.sampled_from(Strategy), st.integers(0, 10), TIMES, ZONES, st.floats(0, 1))
def test_jitter_never_makes_it_earlier_and_never_leaves_the_hour(
    strategy: Strategy, retries: int, now: datetime, where: ZoneInfo, jitter: float
) -> None:
    options = Options(zone=where)
    plain = next_retry(strategy, retries, now, options)
    shaken = next_retry(strategy, retries, now, options, jitter=jitter)
    if plain is None or shaken is None:
        assert strategy is Strategy.MANUAL
        assert plain is shaken is None
        return
    assert now < plain <= shaken <= plain + timedelta(minutes=15)


def test_a_time_of_another_zone_is_the_same_moment() -> None:
    there = NOW.astimezone(BERLIN)
    for strategy in (Strategy.IMMEDIATE, Strategy.SCHEDULED, Strategy.CONDITIONAL):
        due = next_retry(strategy, 0, there, Options())
        assert due == next_retry(strategy, 0, NOW, Options())
        assert due is not None
        assert due.tzinfo is UTC


@pytest.mark.parametrize("name", ["Europe/Atlantis", "", "../etc/passwd", "Europe/Berlin\0", "Europe"])
def test_a_zone_that_is_not_there_says_what_to_install(name: str) -> None:
    with pytest.raises(SettingsError, match="tzdata"):
        zone(name)


def test_a_zone_by_its_name() -> None:
    assert zone("Europe/Berlin") is BERLIN


def test_options_that_make_no_sense_are_refused_all_at_once() -> None:
    with pytest.raises(SettingsError) as refused:
        Options(backoff=(), off_peak_hours=(24,), recheck=timedelta(0), spread=-1)
    assert len(refused.value.problems) == 4
    with pytest.raises(SettingsError):
        Options(backoff=(timedelta(0),))
    with pytest.raises(SettingsError):
        Options(off_peak_hours=())


@pytest.mark.parametrize(
    ("cpu", "memory", "reasons"),
    [
        (79.9, 84.9, []),
        (80, 10, ["CPU at 80 %, must be below 80 %"]),
        (10, 85, ["memory at 85 %, must be below 85 %"]),
        (float("nan"), 10, ["CPU at nan %, must be below 80 %"]),
    ],
)
def test_a_busy_machine_says_what_speaks_against_sending(cpu: float, memory: float, reasons: list[str]) -> None:
    assert LoadLimits().exceeded(cpu, memory) == reasons


def test_limits_name_every_reason() -> None:
    assert len(LoadLimits().exceeded(99, 99)) == 2
    assert LoadLimits(cpu=100, memory=100).exceeded(99, 99) == []


@pytest.mark.parametrize(
    ("asked", "minutes"),
    [(0, 5), (60, 5), (301, 301 / 60), (1800, 30), (3600, 60), (2**32 - 1, 60)],
)
def test_a_failure_that_asks_to_wait_is_not_tried_before(asked: int, minutes: float) -> None:
    for strategy in (Strategy.IMMEDIATE, Strategy.CONDITIONAL):
        due = next_retry(strategy, 1, NOW, Options(), asked=asked)
        assert due == NOW + timedelta(minutes=minutes)
    assert next_retry(Strategy.MANUAL, 1, NOW, Options(), asked=asked) is None
    ignoring = Options(most_asked=timedelta(0))
    assert next_retry(Strategy.IMMEDIATE, 1, NOW, ignoring, asked=asked) == NOW + timedelta(minutes=5)


@given(st.integers(0, 2**32 - 1), TIMES, st.integers(0, 9), st.floats(0, 1))
def test_off_peak_hours_come_after_what_is_asked(asked: int, now: datetime, retries: int, jitter: float) -> None:
    options = Options()
    plain = next_retry(Strategy.SCHEDULED, retries, now, options, jitter=jitter)
    due = next_retry(Strategy.SCHEDULED, retries, now, options, jitter=jitter, asked=asked)
    assert plain is not None
    assert due is not None
    assert due >= plain
    assert due >= now + min(timedelta(seconds=asked), options.most_asked)
