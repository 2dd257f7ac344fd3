from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import termios
from typing import TYPE_CHECKING

import pytest
from program import HANGS_AFTER, ROOT, Program, environment, slowdown

from scripts.servers.server import free_port

if TYPE_CHECKING:
    from program import Client

    from scripts.servers.management import Management

LINE = re.compile(r" *(?P<at>[\d.]+) s  (?P<message>rk\.\S+) +(?P<where>\S+) +(?P<what>.+)")

JOURNEYS = {
    "rk.test.pass": [
        ("test-retry-exchange", "published"),
        ("test-pass-queue", "acknowledged by its consumer"),
    ],
    "rk.test.fail": [
        ("test-retry-exchange", "published"),
        ("test-fail-queue", "rejected by its consumer"),
        ("retry-queue", "dead-lettered by the broker; waits for a drain"),
        ("queue.delay.1", "drain: delay, retry 1 of 3, for 1 s"),
        ("retry-queue-1", "its delay is over; waits for a drain"),
        ("test-fail-queue", "drain: return; rejected by its consumer"),
        ("retry-queue", "dead-lettered by the broker; waits for a drain"),
        ("queue.delay.2", "drain: delay, retry 2 of 3, for 1.5 s"),
        ("retry-queue-2", "its delay is over; waits for a drain"),
        ("test-fail-queue", "drain: return; rejected by its consumer"),
        ("retry-queue", "dead-lettered by the broker; waits for a drain"),
        ("queue.delay.3", "drain: delay, retry 3 of 3, for 2 s"),
        ("retry-queue-3", "its delay is over; waits for a drain"),
        ("test-fail-queue", "drain: return; rejected by its consumer"),
        ("retry-queue", "dead-lettered by the broker; waits for a drain"),
        ("dlq-queue", "drain: dead-letter, retries-exhausted"),
    ],
    "rk.test.fail.pass": [
        ("test-retry-exchange", "published"),
        ("test-fail-pass-queue", "rejected by its consumer"),
        ("retry-queue", "dead-lettered by the broker; waits for a drain"),
        ("queue.delay.1", "drain: delay, retry 1 of 3, for 1 s"),
        ("retry-queue-1", "its delay is over; waits for a drain"),
        ("test-fail-pass-queue", "drain: return; acknowledged by its consumer"),
    ],
}


@pytest.fixture
def demo(broker_url: str) -> Program:
    return Program({"broker_url": broker_url}, (*Program({}).command, "demo"))


def journeys(text: str) -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    for match in filter(None, map(LINE.fullmatch, text.splitlines())):
        found.setdefault(match["message"], []).append((match["where"], match["what"]))
    return found


def on_the_broker(management: Management) -> tuple[list[str], ...]:
    """Names only: what is there, not how full it is."""
    exchanges, queues = management.exchanges(), management.queues()
    bindings = [f"{one['source']} {one['routing_key']} {one['destination']}" for one in management.bindings()]
    return sorted(one["name"] for one in exchanges), sorted(one["name"] for one in queues), sorted(bindings)


def test_in_a_pipe_every_step_is_a_line_and_a_table_says_that_all_went_as_expected(
    demo: Program, management: Management
) -> None:
    done = demo.run()
    assert done.code == 0, done.said
    assert done.seconds < 20 * slowdown()
    assert journeys(done.out) == JOURNEYS
    times = [float(match["at"]) for match in filter(None, map(LINE.fullmatch, done.out.splitlines()))]
    assert times == sorted(times)
    rows = {line[1:16].strip(): line[17:].split() for line in done.out.partition(" message  ")[2].splitlines()}
    assert rows["retries"] == ["0", "3", "1"]
    assert rows["tiers"] == ["-", "1,", "2,", "3", "1"]
    assert rows["where it is now"] == ["acknowledged", "dlq-queue", "acknowledged"]
    assert rows["dlqbatch-reason"] == ["-", "retries-exhausted", "-"]
    assert "got 9 = 4 delayed + 4 returned + 1 dead-lettered + 0 left" in done.out
    assert done.out.endswith("Everything went as expected.\n")
    assert "\x1b" not in done.out
    assert "guest:guest" not in done.said
    assert done.err == ""
    assert on_the_broker(management) == ([], [], [])


@pytest.mark.parametrize("setting", ["queue_type=quorum", "return_via=exchange"])
def test_beside_a_users_own_queues_it_touches_none_of_their_messages(
    demo: Program, team: Client, management: Management, setting: str
) -> None:
    assert Program(demo.settings).run("topology", "apply", "--demonstration").code == 0
    team.publish("retry-exchange", "retry-routing-key", b"a user's")
    team.publish("dlq-exchange", "dlq-routing-key", b"a user's")
    before = on_the_broker(management)
    done = demo.run("--json", "-s", setting)
    assert done.code == 0, done.said
    assert on_the_broker(management) == before
    for queue in ("retry-queue", "dlq-queue"):
        method, properties, body = team.channel.basic_get(queue)
        assert (body, method.redelivered, properties.headers) == (b"a user's", False, None)


def test_two_at_once_print_one_json_object_each_and_do_not_meet(demo: Program, management: Management) -> None:
    for running in [demo.start("--json") for _ in range(2)]:
        out, err = running.communicate()
        assert running.returncode == 0, out + err
        result = json.loads(out)
        assert (result["outcome"], result["differences"], result["counts"]["got"]) == ("ok", [], 9)
        told = {
            one["message"]: [(step["where"], step["what"]) for step in one["journey"]] for one in result["messages"]
        }
        assert told == journeys(err) == JOURNEYS
    assert on_the_broker(management) == ([], [], [])


def test_on_a_terminal_the_journeys_are_drawn_while_they_happen(demo: Program) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    variables = environment(**demo.settings) | {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
    del variables["COLUMNS"], variables["NO_COLOR"]
    with subprocess.Popen(demo.command, env=variables, stdin=theirs, stdout=theirs, stderr=theirs) as running:
        os.close(theirs)
        drawn = b""
        # Linux says by an error that the other end has closed.
        with contextlib.suppress(OSError):
            while chunk := os.read(ours, 65_536):
                drawn += chunk
        os.close(ours)
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", drawn.decode())
    assert running.returncode == 0, text
    assert b"\x1b[1A" in drawn, "nothing was drawn over"
    assert "queue.delay.3: ━" in text
    waited = {match[1] for match in re.finditer(r"([\d.]+) of 2 s", text)}
    assert len(waited) > 3, waited
    picture = text[text.rindex("╭") : text.rindex("╯")]
    assert "✘ → tier 1 → ✘ → tier 2 → ✘ → tier 3 → ✘ → dead letters" in picture
    assert "✘ → tier 1 → ✔ passed" in picture
    assert "Everything went as expected." in text
    assert "Traceback" not in text


def test_a_setting_that_ends_retries_early_is_told_as_a_difference(demo: Program, management: Management) -> None:
    done = demo.but(max_trips="1").run()
    assert done.code == 1
    assert "not as expected: rk.test.fail: reason is too-many-trips, expected retries-exhausted\n" in done.out
    assert "not as expected: rk.test.fail: tiers is (1,), expected (1, 2, 3)\n" in done.out
    assert on_the_broker(management) == ([], [], [])


@pytest.mark.slow
def test_a_dead_letter_that_a_policy_of_the_broker_drops_is_told_as_a_difference(
    demo: Program, management: Management
) -> None:
    policy = {"pattern": "dlq-queue$", "definition": {"max-length": 0}, "apply-to": "queues"}
    management.put(f"policies/{management.vhost}/drops", policy)
    done = demo.run("--json")
    assert (done.code, done.told["outcome"]) == (1, "failed")
    assert done.told["differences"] == [
        "rk.test.fail: where is retry-queue, expected dlq-queue",
        "rk.test.fail: reason is None, expected retries-exhausted",
    ]
    assert done.told["counts"]["dead_lettered"] == 1
    assert done.seconds < 20 * slowdown()
    assert on_the_broker(management) == ([], [], [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stopped_on_the_way_it_deletes_what_it_made(
    demo: Program, management: Management, number: signal.Signals
) -> None:
    with demo.start() as running:
        assert running.stdout is not None
        while "queue.delay.1" not in running.stdout.readline():
            assert running.poll() is None
        assert len(on_the_broker(management)[1]) > 11
        running.send_signal(number)
        _, err = running.communicate()
    assert (running.returncode, err) == (128 + number, "dlqbatch: stopped\n")
    assert on_the_broker(management) == ([], [], [])


def test_when_its_reader_goes_away_it_deletes_what_it_made(demo: Program, management: Management) -> None:
    with demo.start() as running:
        assert running.stdout is not None
        running.stdout.readline()
        running.stdout.close()
        assert running.wait(HANGS_AFTER) == 1
    assert on_the_broker(management) == ([], [], [])


@pytest.mark.parametrize(
    ("may_make", "code", "said"),
    [
        ("^$", 2, "needs the permissions to configure, write and read ^demo-"),
        # Without a return exchange the queue's name becomes the routing key.
        ("^demo-", 1, "not as expected: rk.test.fail.pass: changed is True"),
        (r"^demo-|^dlqbatch\.return\.", 0, "Everything went as expected."),
    ],
)
def test_with_few_permissions_it_manages_or_says_what_is_missing(
    demo: Program, management: Management, may_make: str, code: int, said: str
) -> None:
    user = f"user-{management.vhost}"
    management.put(f"users/{user}", {"password": "hidden", "tags": ""})
    management.put(f"permissions/{management.vhost}/{user}", {"configure": may_make, "write": ".*", "read": ".*"})
    try:
        done = demo.but(broker_url=demo.settings["broker_url"].replace("guest:guest", f"{user}:hidden")).run()
    finally:
        management.delete(f"users/{user}")
    assert done.code == code, done.said
    assert said in done.said
    assert "could not delete" not in done.err
    assert "hidden" not in done.said
    assert on_the_broker(management) == ([], [], [])


def test_without_a_broker_it_says_so_and_ends_with_4(demo: Program) -> None:
    nowhere = f"amqp://someone:hidden@127.0.0.1:{free_port()}/%2F"
    done = demo.but(broker_url=nowhere, connect_timeout_seconds="0.5").run("--json")
    assert done.code == 4
    assert done.told["error"]["type"] == "BrokerUnreachable"
    assert "no connection to the broker at 127.0.0.1:" in done.err
    assert "hidden" not in done.said


def test_the_script_runs_it_on_the_broker_that_is_named(demo: Program, management: Management) -> None:
    # pip itself warns, so warnings are no errors here.
    script = Program(demo.settings, ("env", "-u", "PYTHONWARNINGS", str(ROOT / "scripts" / "demo")))
    done = script.run("--json")
    assert done.code == 0, done.said
    assert done.told["outcome"] == "ok"
    assert "Broker: the one in DLQBATCH_BROKER_URL" in done.err
    assert journeys(done.err) == JOURNEYS

    done = script.but(max_trips="1").run()
    assert done.code == 1
    assert "not as expected: " in done.out
    assert on_the_broker(management) == ([], [], [])
