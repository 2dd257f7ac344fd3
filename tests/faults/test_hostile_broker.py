"""A broker that speaks AMQP badly: the run ends in time, with a word and a code, and fills no memory."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from forked_program import Forked, Warm
from hostile_broker import BODY, HEADER, METHOD, MOST_SENT, PIECE, HostileBroker, frame, got, header, method
from program import HANDLER, HANGS_AFTER, environment
from rawamqp import short

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_MEMORY = 140_000
"""KiB beyond what the program itself takes."""


class Case(NamedTuple):
    moment: str
    act: Callable[[int, Any], None]
    closes: bool = False
    codes: tuple[int, ...] = (1, 3, 4)


def sends(*pieces: Callable[[int], bytes] | bytes) -> Callable[[int, Any], None]:
    def act(channel: int, send: Any) -> None:
        send(b"".join(piece if isinstance(piece, bytes) else piece(channel) for piece in pieces))

    return act


def endlessly(first: Callable[[int], bytes], piece: Callable[[int], bytes]) -> Callable[[int, Any], None]:
    """Until the other side has had enough."""

    def act(channel: int, send: Any) -> None:
        send(first(channel))
        part = piece(channel)
        for _ in range(MOST_SENT // len(part)):
            send(part)

    return act


def whole(channel: int, properties: bytes = b"\0\0") -> bytes:
    return got(channel) + header(channel, 4, properties) + frame(BODY, channel, b"body")


LARGE = 1 << 31
CASES = {
    "greeting: not AMQP": Case("greeting", sends(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10), closes=True),
    "greeting: another version": Case("greeting", sends(b"AMQP\0\1\0\0"), closes=True),
    "greeting: a table that lies": Case("greeting", sends(method(0, 10, 10, b"\0\x09\xff\xff\xff\xff" + bytes(20)))),
    "login: nothing but zeros": Case("login", sends(bytes(4096))),
    "login: frames of no size": Case("login", sends(method(0, 10, 30, bytes(8))), codes=(0, 1, 3, 4)),
    "open: an unknown class": Case("open", sends(method(0, 999, 1))),
    "channel: truncated, then silence": Case("channel", sends(lambda channel: method(channel, 20, 11, bytes(4))[:9])),
    "channel: truncated, then closed": Case(
        "channel", sends(lambda channel: method(channel, 20, 11, bytes(4))[:9]), closes=True
    ),
    "channel: one that was never opened": Case("channel", sends(method(77, 20, 11, bytes(4)))),
    "declare: a wrong end of the frame": Case(
        "declare", sends(lambda channel: frame(METHOD, channel, bytes(8), b"\0"))
    ),
    "declare: a name longer than its frame": Case(
        "declare", sends(lambda channel: method(channel, 50, 11, b"\xffretry"))
    ),
    "declare: a frame of four gigabytes": Case(
        "declare", endlessly(lambda channel: b"\1" + channel.to_bytes(2, "big") + b"\xff" * 4, lambda _: PIECE)
    ),
    "get: an unknown method": Case("get", sends(lambda channel: method(channel, 60, 99))),
    "get: a wrong end of the frame": Case("get", sends(lambda channel: whole(channel)[:-1] + b"\0")),
    "get: a frame of four gigabytes": Case(
        "get", endlessly(lambda channel: b"\1" + channel.to_bytes(2, "big") + b"\xff" * 4, lambda _: PIECE)
    ),
    "get: a header without a method": Case("get", sends(lambda channel: header(channel, 4))),
    "get: a body without a header": Case("get", sends(lambda channel: got(channel) + frame(BODY, channel, b"body"))),
    "get: a body longer than announced": Case(
        "get", sends(lambda channel: got(channel) + header(channel, 4) + frame(BODY, channel, b"longer than it said"))
    ),
    "get: a body that never ends": Case(
        "get",
        endlessly(
            lambda channel: got(channel) + header(channel, 4) + frame(BODY, channel, b"abc"),
            lambda channel: frame(BODY, channel, PIECE[:100_000]),
        ),
    ),
    "get: a body of any size": Case(
        "get",
        endlessly(
            lambda channel: got(channel) + header(channel, 2**63), lambda channel: frame(BODY, channel, PIECE[:100_000])
        ),
    ),
    "get: an address that lies": Case("get", sends(lambda channel: method(channel, 60, 71, bytes(9) + b"\xffx"))),
    "get: a method too short": Case("get", sends(lambda channel: frame(METHOD, channel, b"\0"))),
    "get: an empty header": Case("get", sends(lambda channel: got(channel) + frame(HEADER, channel, b""))),
    "get: a header table that lies": Case(
        # One message that cannot be read: it becomes a dead letter, and the others wait for their turn.
        "get",
        sends(lambda channel: whole(channel, b"\x20\0" + b"\x7f\xff\xff\xff" + short(b"x"))),
        codes=(0, 1, 3, 4),
    ),
    "get: heartbeats and nothing else": Case("get", sends(frame(8, 0, b"") * 1000)),
    "confirm: a tag that was never published": Case(
        "confirm",
        sends(lambda channel: method(channel, 60, 80, (2**63).to_bytes(8, "big") + b"\1")),
        codes=(0, 1, 3, 4),
    ),
    "confirm: a return without a message": Case("confirm", sends(lambda channel: method(channel, 60, 50, bytes(5)))),
}


CERTAIN = (
    "login: nothing but zeros",
    "declare: a name longer than its frame",
    "declare: a frame of four gigabytes",
    "get: a body longer than announced",
    "get: a body of any size",
    "get: an address that lies",
    "get: an empty header",
    "get: a wrong end of the frame",
    "get: a header table that lies",
)


class Ended(NamedTuple):
    code: int
    err: str
    seconds: float
    memory: int
    """KiB at most, beyond those of the program itself."""


def high_water(pid: int) -> int:
    """KiB so far; 0 at the very end."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return int(next((line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")), "0"))


def ended(case: Case, folder: Path, name: str) -> Ended:
    database = folder / f"{abs(hash(name))}.sqlite3"
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE dlq_event_config (id integer PRIMARY KEY, name text, max_retries integer)")
        connection.execute("INSERT INTO dlq_event_config VALUES (1, 'orders.created', 3)")
    connection.close()
    settings = {"database_url": f"sqlite:///{database}", "max_seconds": "2", "settle_seconds": "2"}
    settings |= {"connect_timeout_seconds": "2", "log_level": "warning"}
    error = folder / f"{database.stem}.err"
    with HostileBroker(case.moment, case.act, closes=case.closes) as broker, error.open("wb") as err:
        began = time.monotonic()
        no = subprocess.DEVNULL
        variables = environment(broker_url=broker.url, **settings)
        process = Forked(Warm.of(HANDLER, environment()), [], env=variables, stdin=no, stdout=no, stderr=err)
        itself, memory = high_water(process.pid), 0
        while time.monotonic() < began + HANGS_AFTER:
            memory = max(memory, high_water(process.pid) - itself)
            if process.poll() is not None:
                assert broker.acted.is_set(), f"{name}: it never came to that; {error.read_text()[-2000:]}"
                return Ended(process.returncode, error.read_text(), time.monotonic() - began, memory)
            time.sleep(0.02)
        process.kill()
        process.wait()
    return Ended(-1, error.read_text(), HANGS_AFTER, 0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_whatever_a_broker_sends_the_run_ends_in_time_with_a_word_and_a_code(tmp_path: Path) -> None:
    # DLQBATCH_TEST_LONG=1 takes them all; else these, each by another check.
    names = list(CASES if os.environ.get("DLQBATCH_TEST_LONG") else CERTAIN)
    with ThreadPoolExecutor(5) as pool:
        runs = {name: pool.submit(ended, CASES[name], tmp_path, name) for name in names}
    wrong = []
    for name, run in runs.items():
        done = run.result()
        problems = [] if done.code in CASES[name].codes else [f"exit code {done.code}"]
        problems += ["a traceback"] if "Traceback" in done.err else []
        problems += ["no word"] if done.code and not done.err.strip() else []
        problems += [f"{done.memory:,} KiB"] if done.memory > MOST_MEMORY else []
        if problems:
            wrong.append(f"{name}: {', '.join(problems)} after {done.seconds:.1f} s: {done.err[-600:]}")
        sys.stdout.write(f"{name}: {done.code}, {done.seconds:.1f} s, {done.memory:,} KiB: {done.err.strip()[-150:]}\n")
    assert not wrong, "\n".join(wrong)
