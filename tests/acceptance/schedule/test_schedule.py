"""`dlqbatch schedule` as a machine runs it: real processes on their own times, signals, its end, its health."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import boto3
import psutil
import pytest
from program import DLQ, HANDLER, HANGS_AFTER, RETRY_QUEUE, Client, Program, environment, eventually
from slow_link import SlowLink

from dlqbatch import __version__
from dlqbatch.schedule.processes import LastRun
from dlqbatch.schedule.scheduler import Scheduler
from dlqbatch.settings import load

if TYPE_CHECKING:
    from collections.abc import Iterator

    from scripts.servers.management import Management

ORIGIN = "orders-queue"
NOBODY = "amqp://guest:open-sesame@127.0.0.1:1/"
JOBS = ("drain", "ingest", "lifecycle", "replay", "monitor", "retain", "check")
QUIET = {f"schedule_{job}": "off" for job in JOBS} | {
    "schedule_jitter": "0s",
    "trigger_depth": "0",
    "health_address": "127.0.0.1:0",
}


class Scheduled:
    """A scheduler at work, and everything that it has said so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.out: list[str] = []
        self.err: list[str] = []
        self._readers = [
            threading.Thread(target=lambda: self.out.extend(process.stdout or ()), daemon=True),
            threading.Thread(target=self._read_err, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read_err(self) -> None:
        for line in self.process.stderr or ():
            self.err.append(line)

    def runs(self, job: str) -> list[dict[str, Any]]:
        return [run for run in map(json.loads, list(self.out)) if run["job"] == job]

    def count(self, job: str, name: str) -> int:
        return sum(run.get("counts", {}).get(name, 0) for run in self.runs(job))

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def ask(self, page: str) -> tuple[int, str]:
        try:
            with urlopen(f"http://{self.address}/{page}", timeout=HANGS_AFTER) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def job(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.ask("healthz")[1])["jobs"][name]
        return found

    @property
    def address(self) -> str:
        assert eventually(lambda: any('"scheduling"' in line for line in list(self.err))), self.said
        line = next(line for line in self.err if '"scheduling"' in line)
        return str(json.loads(line)["fields"]["health"])

    @property
    def said(self) -> str:
        return "".join([*self.out, *self.err])

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait(HANGS_AFTER)
        for reader in self._readers:
            reader.join(HANGS_AFTER)
        return code


@contextlib.contextmanager
def scheduled(program: Program, *arguments: str, **changes: str) -> Iterator[Scheduled]:
    process = program.but(**{**QUIET, **changes}).start("schedule", "--json", *arguments)
    running = Scheduled(process)
    try:
        yield running
    finally:
        if process.poll() is None:
            process.kill()
        running.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def many(team: Client, number: int, size: int = 1000) -> None:
    team.make_origin(ORIGIN)
    team.expire("orders", "orders.created", (b"%06d" % n + b"." * (size - 6) for n in range(number)))
    team.await_depth(RETRY_QUEUE, number)


@pytest.fixture(params=["sqlite", "postgresql"])
def installed(request: pytest.FixtureRequest, program: Program) -> Program:
    if request.param == "sqlite":
        return program
    made = program.but(database_url=str(request.getfixturevalue("database_url")))
    for arguments in (("db", "upgrade"), ("events", "set", "orders.*", "3"), ("events", "set", "payment.#", "0")):
        assert made.run(*arguments).code == 0
    return made


def test_jobs_run_on_their_own_times_and_messages_flow(installed: Program, team: Client) -> None:
    team.make_origin(ORIGIN)
    team.fail(ORIGIN, "orders.created", b"one", b"two", b"three")
    team.fail(ORIGIN, "payment.card", b"exhausted")
    with scheduled(installed, schedule_drain="1s", schedule_ingest="1s", schedule_monitor="1s") as running:
        assert eventually(lambda: running.count("ingest", "got") == 1 and team.depth(ORIGIN) == 3), running.said
        assert eventually(lambda: all(len(running.runs(job)) > 1 for job in ("drain", "ingest", "monitor")))
        code, health = running.ask("healthz")
        # The first who asks may be told before the database has been read.
        assert eventually(lambda: "dlqbatch_schedule_store_read 1" in running.ask("metrics")[1].splitlines())
        assert eventually(lambda: f'dlqbatch_queue_depth{{queue="{DLQ}"}} 0' in running.ask("metrics")[1].splitlines())
        assert running.ask("livez")[0] == 200
        lines = running.ask("metrics")[1].splitlines()
        broker = json.loads(running.ask("healthz")[1])["broker"]
        assert running.end() == 0, running.said

    assert (team.depth(RETRY_QUEUE), team.depth(DLQ)) == (0, 0)
    ends = {(run["outcome"], run["exit_code"]) for run in map(json.loads, running.out)}
    assert ends - {("stopped", -signal.SIGTERM)} == {("ok", 0)}  # those of the last moment, before they had begun
    first, second = running.runs("drain")[:2]
    assert (first["counts"]["delayed"], first["counts"]["dead_lettered"]) == (3, 1)
    apart = datetime.fromisoformat(second["began"]) - datetime.fromisoformat(first["began"])
    assert apart > timedelta(seconds=0.5)
    counted = {'{job="drain",decision="delayed"} 3', '{job="drain",decision="dead_lettered"} 1'}
    assert {f"dlqbatch_messages_total{each}" for each in counted} <= set(lines)
    assert code == 200
    told = json.loads(health)
    assert set(told["jobs"]) == {"drain", "ingest", "monitor"}
    assert (told["jobs"]["drain"]["when"], told["jobs"]["drain"]["last_outcome"]) == ("1s", "ok")
    assert told["failing"] == []
    assert told["version"] == __version__
    assert (broker["reachable"], bool(broker["since"])) == (True, True)
    assert "dlqbatch_schedule_broker_reachable 1" in lines
    assert f'dlqbatch_build_info{{version="{__version__}"}} 1' in lines
    assert sum(int(line.split()[1]) for line in lines if line.startswith("dlqbatch_messages{")) == 1
    assert 'dlqbatch_schedule_runs_failed_total{job="drain"} 0' in lines
    named = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(named) == len(set(named))  # a text that says a thing twice is refused as a whole


@pytest.mark.parametrize("asked", ["the scheduler", "everybody, as systemd does"])
def test_a_start_is_left_out_while_a_run_is_at_work_and_a_signal_settles_everything(
    program: Program, team: Client, broker_url: str, asked: str
) -> None:
    many(team, 2000)
    with (
        SlowLink(broker_url, pause_after=100_000) as link,
        scheduled(program, broker_url=link.url, schedule_drain="1s") as running,
    ):
        assert link.paused.wait(HANGS_AFTER), running.said
        assert eventually(lambda: running.job("drain")["left_out"] >= 2), running.said
        assert (running.job("drain")["running"], running.job("drain")["started"]) == (1, 1)
        (child,) = running.children()
        if asked != "the scheduler":
            child.send_signal(signal.SIGTERM)
        running.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: any('"ending' in line for line in list(running.err)))
        link.go_on()
        assert running.wait() == 0, running.said

    (run,) = running.runs("drain")
    assert sum('"a start was left out"' in line for line in running.err) == 1  # the counter tells of the others
    assert (run["outcome"], run["stopped_by"]) == ("ok", "signal")
    delayed = run["counts"]["delayed"]
    assert 0 < delayed == run["counts"]["got"] < 2000
    team.await_depth(RETRY_QUEUE, 2000 - delayed)  # what is not acknowledged would be in no depth
    team.await_depth("retry-queue-1", delayed)


def test_a_second_signal_ends_at_once(program: Program, team: Client, broker_url: str) -> None:
    many(team, 2000)
    with (
        SlowLink(broker_url, pause_after=100_000) as link,
        scheduled(program, broker_url=link.url, schedule_drain="1h") as running,
    ):
        assert link.paused.wait(HANGS_AFTER), running.said
        (child,) = running.children()
        running.process.send_signal(signal.SIGINT)
        assert eventually(lambda: any('"ending' in line for line in list(running.err)))
        assert child.is_running()
        assert running.end(signal.SIGINT) == 128 + signal.SIGINT, running.said
        assert not child.is_running()
        link.go_on()
    assert "killed before they had settled" in running.said
    queues = (RETRY_QUEUE, "retry-queue-1")
    assert eventually(lambda: sum(map(team.depth, queues)) >= 2000)  # what was under way may be there twice
    assert len({one.body[:6] for queue in queues for one in team.contents(queue)}) == 2000


def stopped_run(running: Scheduled) -> psutil.Process:
    """A run that does nothing any more, whatever happens to it, and cannot even be asked to."""
    found: list[psutil.Process] = []

    def is_stopped() -> bool:
        with contextlib.suppress(psutil.Error):
            # Once it has its arguments it is a program; before, whoever starts it is still waiting for it.
            found[:] = [child for child in running.children() if "drain" in child.cmdline()]
            for child in found:
                child.suspend()
        return bool(found)

    assert eventually(is_stopped), running.said
    return found[0]


@pytest.mark.parametrize("goes_on", [False, True], ids=["it never moves again", "it goes on when it is asked to end"])
def test_a_run_that_does_not_end_is_made_to_and_counts_as_failed(
    program: Program, team: Client, *, goes_on: bool
) -> None:
    team.make_origin(ORIGIN)
    team.fail(ORIGIN, "orders.created", b"one")
    bounds = {"connect_timeout_seconds": "1", "max_seconds": "0.5", "settle_seconds": "2"}
    with scheduled(program, schedule_drain="1s", **bounds) as running:
        hung = stopped_run(running)
        assert eventually(lambda: any("a run takes too long" in line for line in list(running.err))), running.said
        if goes_on:
            hung.resume()
        assert eventually(lambda: any(run["outcome"] == "ok" for run in running.runs("drain"))), running.said
        state = running.job("drain")
        assert running.end() == 0, running.said

    # On a machine that does other things too, a later one may be slow as well.
    made_to = next(run for run in running.runs("drain") if run["outcome"] == "timed_out")
    assert (made_to["exit_code"] == -signal.SIGKILL) is not goes_on
    assert state["failed"] >= 1
    assert '"job": "drain"' in next(line for line in running.err if "a run takes too long" in line)
    assert any("it is killed" in line for line in running.err) is not goes_on
    team.await_depth(RETRY_QUEUE, 0)  # whoever comes next takes what it could not


def test_an_end_for_which_a_run_had_to_be_killed_is_no_end_in_order(program: Program) -> None:
    with scheduled(program, schedule_drain="1h", max_seconds="0.5", settle_seconds="0.5") as running:
        hung = stopped_run(running)
        assert running.end() == 1, running.said
        assert not hung.is_running()
    assert "killed before they had settled" in running.said


def test_runs_end_in_order_when_their_scheduler_is_killed(program: Program, team: Client, broker_url: str) -> None:
    many(team, 2000)
    with (
        SlowLink(broker_url, pause_after=100_000) as link,
        scheduled(program, broker_url=link.url, schedule_drain="1h") as running,
    ):
        assert link.paused.wait(HANGS_AFTER), running.said
        (child,) = running.children()
        running.process.kill()
        running.process.wait(HANGS_AFTER)
        link.go_on()
        with contextlib.suppress(psutil.NoSuchProcess):
            child.wait(HANGS_AFTER)
        running.wait()
    assert '"stopped_by": "signal"' in running.said  # as its log says it; nobody reads its stdout any more
    left = team.depth(RETRY_QUEUE)
    assert 0 < left < 2000
    team.await_depth("retry-queue-1", 2000 - left)


def test_deep_queues_get_as_many_drains_as_there_may_be_and_no_more(program: Program, team: Client) -> None:
    many(team, 1200, size=100)
    deep = {"trigger_depth": "300", "trigger_interval": "1s", "max_workers": "2", "max_messages": "300"}
    with scheduled(program, schedule_drain="1s", **deep) as running:
        assert eventually(lambda: team.depth(RETRY_QUEUE) == 0), running.said
        assert running.end() == 0, running.said

    runs = sorted((run["began"], run["ended"]) for run in running.runs("drain"))
    at_work = [sum(began <= moment < ended for began, ended in runs) for moment, _ in runs]
    assert max(at_work) == 2
    assert running.count("drain", "delayed") == 1200


def test_a_job_that_fails_is_told_and_goes_on_and_health_says_so(program: Program) -> None:
    changes = {"broker_url": NOBODY, "connect_timeout_seconds": "0.2", "database_url": "sqlite:////nowhere/db.sqlite3"}
    with scheduled(program, schedule_drain="1s", **changes) as running:
        assert running.ask("healthz")[0] == 200  # it has only begun
        assert eventually(lambda: running.ask("healthz")[0] == 503), running.said
        told = json.loads(running.ask("healthz")[1])
        code, metrics = running.ask("metrics")
        assert running.end() == 0

    assert told["failing"] == ["drain"]
    assert told["jobs"]["drain"]["failures_in_a_row"] >= 3
    assert (told["jobs"]["drain"]["last_exit_code"], told["jobs"]["drain"]["last_success"]) == (4, None)
    assert all(run["error"]["type"] == "BrokerUnreachable" for run in running.runs("drain")[:3])
    # The database is away too: the scheduler's own figures are told all the same.
    assert code == 200
    assert "dlqbatch_schedule_store_read 0" in metrics.splitlines()
    assert "dlqbatch_schedule_well 0" in metrics.splitlines()
    assert "open-sesame" not in running.said + metrics + json.dumps(told)


def test_a_broker_that_is_away_is_seen_long_before_a_job_counts_as_failing(program: Program) -> None:
    away = {"broker_url": NOBODY, "connect_timeout_seconds": "0.2", "trigger_interval": "1s"}
    with scheduled(program, schedule_drain="1h", **away) as running:
        assert eventually(lambda: "dlqbatch_schedule_broker_reachable 0" in running.ask("metrics")[1].splitlines())
        code, health = running.ask("healthz")
        assert running.end() == 0, running.said
    assert json.loads(health)["broker"]["reachable"] is False
    assert code == 200  # it is no reason to start the scheduler anew


def test_deep_dead_letters_get_as_many_ingests_as_there_may_be(
    program: Program, team: Client, database_url: str
) -> None:
    installed = program.but(database_url=database_url)
    assert installed.run("db", "upgrade").code == 0
    assert installed.run("topology", "apply").code == 0
    deep = {"trigger_ingest_depth": "3", "trigger_interval": "1s", "max_messages": "4"}
    # After its first run the next one would come in an hour.
    with scheduled(installed, schedule_ingest="1h", **deep) as running:
        assert eventually(lambda: len(running.runs("ingest")) == 1), running.said
        for number in range(13):
            team.publish("", DLQ, b"%d" % number)
        assert eventually(lambda: team.depth(DLQ) < 3), running.said
        assert running.end() == 0, running.said
    runs = sorted((run["began"], run["ended"]) for run in running.runs("ingest"))
    assert all(earlier[1] <= later[0] for earlier, later in itertools.pairwise(runs))
    assert running.count("ingest", "recorded") == 13 - team.depth(DLQ)


def test_a_scheduler_whose_main_loop_stands_still_is_not_alive(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {**program.settings, **QUIET, "schedule_monitor": "1h"}
    given.pop("config", None)
    idle = Scheduler(load(given, {"DLQBATCH_CONFIG": os.devnull}), {})
    monkeypatch.setattr("dlqbatch.schedule.scheduler._PULSE_WITHIN", 3600.0)
    assert idle.has_pulse()
    monkeypatch.setattr("dlqbatch.schedule.scheduler._PULSE_WITHIN", 0.0)
    assert not idle.has_pulse()
    monkeypatch.setattr(idle, "_pulse", time.monotonic() - 60)
    monkeypatch.setattr("dlqbatch.schedule.scheduler._PULSE_WITHIN", 50.0)
    assert not idle.has_pulse()
    idle.keep_time()
    assert idle.has_pulse()
    monkeypatch.setattr("dlqbatch.schedule.scheduler._PULSE_WITHIN", 0.0)
    assert not idle.has_pulse()


def test_a_drain_that_may_not_read_is_no_success(program: Program, team: Client, management: Management) -> None:
    team.make_origin(ORIGIN)
    team.fail(ORIGIN, "orders.created", b"one")
    name, place = f"app-{management.vhost}", program.settings["broker_url"].rpartition("@")[2]
    rights = {"configure": ".*", "write": ".*", "read": "^(?!retry-queue).*$"}
    management.put(f"users/{name}", {"password": "p", "tags": ""})
    management.put(f"permissions/{management.vhost}/{name}", rights)
    try:
        with scheduled(program, schedule_drain="1s", broker_url=f"amqp://{name}:p@{place}") as running:
            assert eventually(lambda: running.ask("healthz")[0] == 503), running.said
            told = json.loads(running.ask("healthz")[1])
            management.put(f"permissions/{management.vhost}/{name}", rights | {"read": ".*"})
            assert eventually(lambda: running.ask("healthz")[0] == 200), running.said
            assert running.end() == 0
    finally:
        management.delete(f"users/{name}")
    assert told["failing"] == ["drain"]
    first = running.runs("drain")[0]
    assert (first["outcome"], first["exit_code"], first["counts"]["got"]) == ("partial", 3, 0)
    assert "ACCESS_REFUSED" in running.said


@pytest.mark.parametrize(
    ("code", "counts", "is_done"),
    [
        (0, {"got": 0, "delayed": 0, "left": 0}, True),
        (3, {"got": 5, "delayed": 1, "left": 4}, True),
        (3, {"got": 5, "delayed": 0, "left": 5}, False),
        (3, {"got": 0, "delayed": 0, "left": 0}, False),
        (3, {}, False),  # nobody knows
        (3, {"got": 2, "sent": 0, "left": 2, "resolved": 1}, True),
        (4, {}, False),
    ],
)
def test_a_run_that_left_everything_did_not_do_well(code: int, counts: dict[str, int], *, is_done: bool) -> None:
    now = datetime.now(UTC)
    assert LastRun("drain", now, now, code, {"counts": counts}).is_done is is_done
    assert not LastRun("drain", now, now, code, {"counts": counts}, timed_out=True).is_done


def test_a_broker_that_is_away_is_told_once_by_each_run_with_the_reason(program: Program) -> None:
    done = program.but(broker_url=NOBODY, connect_timeout_seconds="2").run("drain")
    assert done.code == 4
    (line,) = [line for line in done.err.splitlines() if "cannot be reached yet" in line]
    fields = json.loads(line)["fields"]
    assert fields["where"].startswith("127.0.0.1:1,")
    assert "refused" in fields["why"]


@pytest.mark.parametrize("started_by", ["a scheduler", "hand"])
def test_progress_is_drawn_on_the_terminal_of_a_run_by_hand_only(
    program: Program, team: Client, broker_url: str, started_by: str
) -> None:
    many(team, 2000)
    by_hand = started_by == "hand"
    ours, theirs = os.openpty()
    with SlowLink(broker_url, pause_after=100_000) as link:
        changed = program.but(**{**QUIET, "schedule_drain": "1h", "broker_url": link.url})
        process = subprocess.Popen(
            [*changed.command, "drain" if by_hand else "schedule", "--json"],
            env=environment(**changed.settings),
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=theirs,
        )
        os.close(theirs)
        shown: list[bytes] = []
        reader = threading.Thread(target=read_terminal, args=(ours, shown))
        reader.start()
        try:
            assert link.paused.wait(HANGS_AFTER), shown
            began = time.monotonic()
            assert eventually(lambda: time.monotonic() - began > 1)  # sooner it would draw nothing anyway
            link.go_on()
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["counts"]["delayed"] == 2000
            process.terminate()
            process.wait(HANGS_AFTER)
            process.stdout.close()
        finally:
            process.kill()
            process.wait(HANGS_AFTER)
            reader.join(HANGS_AFTER)
            os.close(ours)
    assert (b"of 2,000 taken" in b"".join(shown)) is by_hand


def read_terminal(ours: int, shown: list[bytes]) -> None:
    with contextlib.suppress(OSError):  # how a terminal says that its program has ended
        while chunk := os.read(ours, 4096):
            shown.append(chunk)


def test_what_the_command_line_says_holds_for_the_runs_and_stays_out_of_their_arguments(
    program: Program, team: Client, broker_url: str
) -> None:
    given = ("-s", f"broker_url={broker_url}", "-s", "dlq-queue=dead-ones", "-s", "topology.pay.kind=per-queue")
    given += ("-s", "topology.pay.queue=pay", "-s", "topology.pay.exchange=shop", "-s", "schedule_drain=1s")
    seen: list[str] = []
    with scheduled(program, *given, broker_url=NOBODY) as running:

        def watched() -> bool:
            with contextlib.suppress(psutil.Error):
                seen.extend(" ".join(child.cmdline()) for child in running.children())
            return len(running.runs("drain")) > 1

        assert eventually(watched), running.said
        running.end()
    assert running.runs("drain")[0]["outcome"] == "ok", running.said
    assert team.exists("dead-ones")
    assert team.exists("pay.retry")
    # Between its fork and its exec a child shows what its parent was started with.
    seen = [line for line in seen if " schedule " not in line]
    assert any("drain" in line for line in seen)
    assert not any("guest" in line for line in seen)


def test_lines_for_people_and_no_health(program: Program, team: Client) -> None:
    team.make_origin(ORIGIN)
    team.fail(ORIGIN, "orders.created", b"one")
    process = program.but(**{**QUIET, "schedule_drain": "1h", "health_address": "off"}).start("schedule")
    line = process.stdout.readline() if process.stdout is not None else ""
    process.terminate()
    out, err = process.communicate(timeout=HANGS_AFTER)
    assert process.returncode == 0, err
    assert "drain: ok, got 1, delayed 1," in line
    assert out == ""
    assert '"health": "off"' in err


def test_it_goes_on_when_nobody_reads_what_it_says(program: Program, team: Client) -> None:
    team.make_origin(ORIGIN)
    # Python itself is started: what becomes of its stdout is what this is about.
    started = Program(program.but(**{**QUIET, "schedule_drain": "1s"}).settings, (sys.executable, "-B", HANDLER))
    process = started.start("schedule")
    assert process.stdout is not None
    process.stdout.close()
    team.fail(ORIGIN, "orders.created", b"one")
    try:
        team.await_depth(ORIGIN, 1)  # delayed by one run and returned by a later one
    finally:
        process.terminate()
        code = process.wait(HANGS_AFTER)
        for stream in (process.stdin, process.stderr):
            if stream is not None:
                stream.close()
    assert code == 0


def test_the_plan_of_a_dry_run_connects_to_nothing(program: Program) -> None:
    changes = {"broker_url": NOBODY, "database_url": "postgresql://a:open-sesame@127.0.0.1:1/b"}
    changes |= {"time_zone": "Europe/Berlin", "schedule_retain": "30 2 * * 0", "schedule_drain": "10m"}
    nowhere = program.but(**{**QUIET, **changes, "trigger_depth": "700", "max_workers": "3"})
    told = nowhere.run("schedule", "--dry-run", "--json")
    words = nowhere.run("schedule", "--dry-run")
    assert (told.code, words.code) == (0, 0), told.said + words.said
    jobs = {one["job"]: one for one in told.told["jobs"]}
    assert set(jobs) == {"drain", "retain"}
    drains = [datetime.fromisoformat(at) for at in jobs["drain"]["next"]]
    assert [later - drains[0] for later in drains] == [timedelta(minutes=10 * n) for n in range(3)]
    for at in map(datetime.fromisoformat, jobs["retain"]["next"]):
        assert (at.isoweekday(), at.hour, at.minute) == (7, 2, 30)
    assert told.told["trigger"] == {
        "depth": 700,
        "interval_seconds": 5.0,
        "max_workers": 3,
        "ingest_depth": 0,  # it is off
        "max_ingest_workers": 1,
    }
    assert "at 700 messages up to 3 drains at once, looked at every 5 s" in words.out
    assert "monitor    off" in words.out
    assert "open-sesame" not in told.said + words.said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "there is nothing to schedule"),
        ({"schedule_drain": "soon"}, "DLQBATCH_SCHEDULE_DRAIN"),
        ({"schedule_check": "1m"}, "dlqbatch.check-queues"),
        ({"schedule_ingest": "1m", "database_url": ""}, "DLQBATCH_DATABASE_URL"),
        ({"schedule_drain": "1m", "ladder": "false"}, "there is nothing to drain"),
    ],
)
def test_what_can_only_go_wrong_is_refused_before_anything_starts(
    program: Program, changes: dict[str, str], said: str
) -> None:
    done = program.but(**{**QUIET, **changes}).run("schedule")
    assert done.code == 2, done.said
    assert said in done.err
    assert done.out == ""


def test_an_address_in_use_is_told_before_anything_starts(program: Program, team: Client) -> None:
    team.make_origin(ORIGIN)
    team.fail(ORIGIN, "orders.created", b"one")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = program.but(**{**QUIET, "schedule_drain": "1s", "health_address": address}).run("schedule", "--json")
    assert done.code == 1, done.said
    assert f"{address} is taken" in done.told["error"]["message"]
    team.await_depth(RETRY_QUEUE, 1)


def test_it_lives_through_a_new_password_in_the_secret(
    program: Program, team: Client, management: Management, aws: dict[str, str]
) -> None:
    name = f"app-{management.vhost}"
    place = program.settings["broker_url"].rpartition("@")[2]
    vault = boto3.client("secretsmanager")
    vault.create_secret(Name="dlqbatch/schedule", SecretString="{}")

    def use(password: str) -> None:
        management.put(f"users/{name}", {"password": password, "tags": "management"})
        held = json.dumps({"broker_url": f"amqp://{name}:{password}@{place}"})
        vault.put_secret_value(SecretId="dlqbatch/schedule", SecretString=held)

    use("0ld-c4n4ry")
    management.put(f"permissions/{management.vhost}/{name}", {"configure": ".*", "write": ".*", "read": ".*"})
    # A heartbeat so short that each look at the depth is a login of its own.
    changes = {"broker_url": "", "secret": "dlqbatch/schedule", "no_proxy": "127.0.0.1", "heartbeat_seconds": "12"}
    deep = {"trigger_depth": "10", "trigger_interval": "7s"}
    try:
        with scheduled(program, **changes, **deep) as running:
            many(team, 20, size=100)
            assert eventually(lambda: running.count("drain", "delayed") == 20), running.said
            use("n3w-c4n4ry")
            many(team, 20, size=100)
            assert eventually(lambda: running.count("drain", "delayed") == 40), running.said
            assert running.end() == 0
    finally:
        management.delete(f"users/{name}")
    assert "c4n4ry" not in running.said


@pytest.mark.slow
def test_a_cron_expression_starts_runs(program: Program) -> None:
    with scheduled(program, schedule_monitor="* * * * *") as running:
        expected = datetime.fromisoformat(running.job("monitor")["next"])
        assert eventually(lambda: bool(running.runs("monitor"))), running.said
        assert running.end() == 0
    began = datetime.fromisoformat(running.runs("monitor")[0]["began"])
    assert (began.second, began.replace(microsecond=0)) == (0, expected)
