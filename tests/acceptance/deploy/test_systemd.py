"""The units in deploy/systemd and the crontab in deploy/cron, as systemd and cron would take them."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import httpx2
import pytest
from apscheduler.triggers.cron import CronTrigger
from program import HANGS_AFTER, ROOT, environment, eventually

from dlqbatch import settings
from scripts.servers.server import free_port

if TYPE_CHECKING:
    from program import Client, Program

UNITS = sorted((ROOT / "deploy" / "systemd").iterdir())
TIMERS = [unit for unit in UNITS if unit.suffix == ".timer"]
SERVICES = [unit for unit in UNITS if unit.suffix == ".service"]
JOBS = ("drain", "ingest", "lifecycle", "monitor", "replay", "retain")
PLACE, CONFIG, LOGS = "/opt/dlqbatch", "/etc/dlqbatch/application.properties", "/var/log/dlqbatch"
PYTHON, BIN = f"{PLACE}/.venv/bin/python", str(Path(sys.executable).parent)
# Of 100. What is left open it needs: the network, any broker's address, /proc for the machine's CPU and memory.
EXPOSURE = 20


class Entry(NamedTuple):
    when: str
    user: str
    command: str


def lines_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


CRONTAB = lines_of((ROOT / "deploy" / "cron" / "crontab").read_text())
VARIABLES = dict(line.split("=", 1) for line in CRONTAB if re.match(r"[A-Z_]+=", line))
ENTRIES = [
    Entry(" ".join(fields[:5]), fields[5], fields[6])
    for line in CRONTAB
    if not re.match(r"[A-Z_]+=", line) and (fields := line.split(maxsplit=6))
]


def options(unit: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in lines_of(unit.read_text()):
        if "=" in line:
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("systemd-analyze") is None:
        pytest.fail(
            "There is no systemd-analyze here. On Debian or Ubuntu: sudo apt-get install systemd", pytrace=False
        )
    return subprocess.run(
        ["systemd-analyze", *arguments], capture_output=True, text=True, timeout=HANGS_AFTER, check=False
    )


@pytest.fixture
def installed(tmp_path: Path) -> list[Path]:
    """The units with this checkout in the place of the installation: what they start is looked for."""
    for unit in UNITS:
        (tmp_path / unit.name).write_text(adapted(unit.read_text()))
    return sorted(tmp_path.iterdir())


def test_systemd_finds_nothing_wrong_with_the_units(installed: list[Path]) -> None:
    # A template is looked at as one of its instances.
    named = [str(unit).replace("@.service", "@drain.service") for unit in installed]
    done = analyze("verify", *named)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_systemd_finds_what_is_wrong(installed: list[Path]) -> None:
    timer = installed[0].parent / "dlqbatch-drain.timer"
    timer.write_text(timer.read_text().replace("OnUnitInactiveSec=60s", "OnUnitInactiveSec=soon"))
    assert "Failed to parse timer value" in analyze("verify", str(timer)).stderr


@pytest.mark.parametrize("unit", SERVICES, ids=lambda unit: unit.name)
def test_a_service_may_do_little(unit: Path) -> None:
    done = analyze("security", "--offline=true", f"--threshold={EXPOSURE}", str(unit))
    assert done.returncode == 0, done.stdout + done.stderr


def test_all_services_are_closed_in_the_same_way() -> None:
    closed = [
        unit.read_text().partition("# What the process may do")[2].partition("\n\n[")[0].strip() for unit in SERVICES
    ]
    assert len(closed) == 3
    assert closed[0] == closed[1] == closed[2] != ""


def test_each_timer_starts_its_job() -> None:
    assert [timer.name for timer in TIMERS] == [f"dlqbatch-{job}.timer" for job in JOBS]
    for timer, job in zip(TIMERS, JOBS, strict=True):
        found = options(timer)
        assert found["Unit"] == [f"dlqbatch@{job}.service"]
        # Without a start to count from, a timer that counts from the last end would never begin.
        assert ("OnActiveSec" in found) == ("OnUnitInactiveSec" in found)
        for calendar in found.get("OnCalendar", []):
            assert analyze("calendar", calendar).returncode == 0
        assert ("OnCalendar" in found) == ("Persistent" in found)


def test_the_timers_are_as_frequent_as_the_schedule() -> None:
    defaults = settings.load({}, {"DLQBATCH_CONFIG": "/dev/null"})
    for timer, job in zip(TIMERS, JOBS, strict=True):
        if every := options(timer).get("OnUnitInactiveSec"):
            assert every == [getattr(defaults, f"schedule_{job}")], job


def test_no_time_out_cuts_a_run_short() -> None:
    defaults = settings.load({}, {"DLQBATCH_CONFIG": "/dev/null"})
    bound = defaults.connect_timeout_seconds + defaults.max_seconds + defaults.settle_seconds
    once, schedule = unit_named("dlqbatch@.service"), unit_named("dlqbatch-schedule.service")
    longest = bound - defaults.max_seconds + defaults.retain_max_seconds
    assert int(once["TimeoutStartSec"][0].removesuffix("min")) * 60 > longest
    assert int(once["TimeoutStopSec"][0]) > defaults.settle_seconds
    assert int(schedule["TimeoutStopSec"][0]) > bound
    assert schedule["KillMode"] == ["mixed"]  # the scheduler tells its runs itself


def adapted(text: str) -> str:
    """With this checkout and this Python in the place of the installation."""
    return text.replace(PYTHON, sys.executable).replace(f"{PLACE}/.venv/bin", BIN).replace(PLACE, str(ROOT))


def unit_named(name: str) -> dict[str, list[str]]:
    return options(ROOT / "deploy" / "systemd" / name)


@pytest.fixture
def etc(program: Program, tmp_path: Path) -> dict[str, str]:
    """The environment of a process whose settings are the example file with the addresses of the test.

    `program` has put its SQLite file where the example looks for one, in the folder for the state: that of the test.
    """
    text = (ROOT / "deploy" / "application.properties").read_text().replace("/var/lib/dlqbatch", str(tmp_path))
    text = re.sub(r"^(dlqbatch\.broker-url)=.*$", rf"\1={program.settings['broker_url']}", text, flags=re.MULTILINE)
    own = {"tier-ttls": program.settings["tier_ttls"], "health-address": f"127.0.0.1:{free_port()}"}
    file = tmp_path / "application.properties"
    file.write_text(text + "".join(f"dlqbatch.{name}={value}\n" for name, value in own.items()))
    return environment() | {"DLQBATCH_CONFIG": str(file)}


def test_the_example_of_a_properties_file_holds_settings_only(tmp_path: Path) -> None:
    text = (ROOT / "deploy" / "application.properties").read_text()
    both = (
        text,
        text.replace("\ndlqbatch.database-url=sqlite", "\n#").replace("\n# dlqbatch.database", "\ndlqbatch.database"),
    )
    for number, one in enumerate(both):
        file = tmp_path / f"{number}.properties"
        file.write_text(one)
        loaded = settings.load({}, {"DLQBATCH_CONFIG": str(file)})
        assert loaded.database_url is not None
        assert not loaded.warnings
    assert unit_named("dlqbatch@.service")["StateDirectory"] == ["dlqbatch"]  # where the file puts what is written


def test_every_service_does_its_job_as_it_stands(etc: dict[str, str], team: Client, tmp_path: Path) -> None:
    unit = unit_named("dlqbatch@.service")
    assert (
        unit["Environment"] == unit_named("dlqbatch-schedule.service")["Environment"] == [f"DLQBATCH_CONFIG={CONFIG}"]
    )
    team.make_origin("orders-queue")
    team.fail("orders-queue", "orders.created", b"one")
    for job in JOBS:
        words = shlex.split(adapted(unit["ExecStart"][0].replace("%i", job)))
        done = subprocess.run(
            words, env=etc, cwd=tmp_path, capture_output=True, text=True, timeout=HANGS_AFTER, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert team.depth("retry-queue") == 0
    assert team.depth("queue.delay.1") + team.depth("retry-queue-1") == 1


def test_the_scheduler_s_service_starts_serves_and_ends_at_its_signal(etc: dict[str, str], team: Client) -> None:
    unit = unit_named("dlqbatch-schedule.service")
    team.make_origin("orders-queue")
    team.fail("orders-queue", "orders.created", b"one")
    words = shlex.split(adapted(unit["ExecStart"][0]))
    process = subprocess.Popen(words, env=etc, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert eventually(lambda: team.depth("retry-queue") == 0 or process.poll() is not None)
        process.send_signal(getattr(signal, unit["KillSignal"][0]))
        said, _ = process.communicate(timeout=int(unit["TimeoutStopSec"][0]))
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, said


def test_the_console_s_service_starts_answers_and_ends_at_its_signal(etc: dict[str, str]) -> None:
    unit = unit_named("dlqbatch-console.service")
    etc |= {"DLQBATCH_CONSOLE_ADDRESS": "127.0.0.1:0"}
    words = shlex.split(adapted(unit["ExecStart"][0]))
    assert subprocess.run([*words[:-1], "db", "upgrade"], env=etc, capture_output=True, check=False).returncode == 0
    process = subprocess.Popen(words, env=etc, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said = next((line for line in process.stderr if " open http" in line), "")
        with httpx2.Client(follow_redirects=True) as browser:
            assert "Nothing is dead" in browser.get(said.partition(" open ")[2].strip()).text
        process.send_signal(getattr(signal, unit["KillSignal"][0]))
        process.communicate(timeout=HANGS_AFTER)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0


def test_cron_would_understand_every_line() -> None:
    assert set(VARIABLES) == {"SHELL", "PATH", "MAILTO", "DLQBATCH_CONFIG"}
    assert VARIABLES["DLQBATCH_CONFIG"] == CONFIG
    assert len(ENTRIES) + len(VARIABLES) == len(CRONTAB)
    for entry in ENTRIES:
        CronTrigger.from_crontab(entry.when)
        assert entry.user == "dlqbatch"
        assert "%" not in entry.command  # cron takes it for the end of the line
        assert "flock" not in entry.command
    starts = [re.match(r"(?:sleep (\d+); )?", entry.command) for entry in ENTRIES if entry.when == "* * * * *"]
    seconds = [int(start[1] or 0) for start in starts if start]
    assert seconds == sorted(set(seconds))
    assert seconds[-1] < 60


def in_cron(command: str, etc: dict[str, str], logs: Path) -> str:
    """What cron would mail: it starts every command with these variables, and hardly any other."""
    command = re.sub(r"^sleep \d+; ", "", adapted(command)).replace(LOGS, str(logs))
    variables = {"PATH": adapted(VARIABLES["PATH"]), "DLQBATCH_CONFIG": etc["DLQBATCH_CONFIG"], "HOME": "/"}
    shell = [VARIABLES["SHELL"], "-c", command]
    done = subprocess.run(
        shell, env=variables, cwd="/", capture_output=True, text=True, timeout=HANGS_AFTER, check=False
    )
    return done.stdout + done.stderr


def test_every_line_of_the_crontab_does_its_job_as_it_stands(etc: dict[str, str], team: Client, tmp_path: Path) -> None:
    team.make_origin("orders-queue")
    team.fail("orders-queue", "orders.created", b"one")
    for entry in ENTRIES:
        assert in_cron(entry.command, etc, tmp_path) == "", "cron mails what a command prints"
    assert team.depth("retry-queue") == 0
    logged = [json.loads(line)["fields"] for line in (tmp_path / "runs.log").read_text().splitlines()]
    assert [fields["job"] for fields in logged if "outcome" in fields] == list(JOBS)
    assert {fields["outcome"] for fields in logged if "outcome" in fields} == {"ok"}


def test_a_run_of_cron_that_fails_is_mailed(tmp_path: Path) -> None:
    for entry, job in zip(ENTRIES, JOBS, strict=True):
        mailed = in_cron(entry.command, {"DLQBATCH_CONFIG": str(tmp_path / "none.properties")}, tmp_path)
        assert mailed == f"{job} ended with exit code 2\n"
    assert "none.properties" in (tmp_path / "runs.log").read_text()


def test_the_log_that_cron_writes_is_the_one_that_is_rotated() -> None:
    rotated = (ROOT / "deploy" / "cron" / "logrotate").read_text()
    for entry in ENTRIES:
        (log,) = re.findall(r"2>>(\S+)", entry.command)
        assert f"\n{log} {{" in rotated
