#!/usr/bin/env python3
"""Runs a command beside private servers: `scripts/services.py run --rabbitmq --postgres -- COMMAND...`.

The command finds them in DLQBATCH_TEST_BROKER_URL, DLQBATCH_TEST_MANAGEMENT_URL and DLQBATCH_TEST_DATABASE_URL (another
beginning of the names with --prefix), and its exit code is ours; 4 if a server did not start. Without a command the
addresses are printed, and the servers run until Ctrl-C.
RabbitMQ 4.3 (--rabbitmq43) is in ..._BROKER43_URL and ..._MANAGEMENT43_URL, and is the broker of BROKER_URL too if no
other one is asked for. With --cluster BROKER_URL lists the hosts of a cluster of three.
`scripts/services.py prepare43` fetches RabbitMQ 4.3, if that was not done yet, and prints where it is.
`scripts/services.py accepts URL` ends with 0 if the AMQP broker at URL lets its user in.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if __name__ == "__main__":  # it is run as a file, from any folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from scripts.servers import rabbitmq43 as newer
from scripts.servers.amqp import accepts
from scripts.servers.cluster import RabbitCluster
from scripts.servers.postgres import PostgresCluster
from scripts.servers.rabbitmq import YIELDING, RabbitNode
from scripts.servers.server import Guard, Server, ServiceError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

UNREACHABLE = 4  # as the program itself ends when a broker or a database cannot be reached
IN_MEMORY = Path("/dev/shm")
ROOM = 8 << 30
"""Bytes that have to be free in memory before files are kept there."""


@contextlib.contextmanager
def work_folder(*, volatile: bool = False) -> Iterator[Path]:
    """A short path that every user can walk to, deleted afterwards, even if we are killed.

    A volatile one is in memory where there is room: its files outlive a killed server, but not the machine.
    """
    place = IN_MEMORY if volatile and _has_room() else Path("/tmp")
    folder = Path(tempfile.mkdtemp(prefix="dlqbatch-", dir=place))
    try:
        folder.chmod(0o711)
        Guard.tell(f"remove {folder}")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _has_room() -> bool:
    try:
        free = shutil.disk_usage(IN_MEMORY).free
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return False
    available = next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 0)
    return min(free, available) >= ROOM


def node_of_43(folder: Path, plugins: tuple[str, ...] = (), *, light: bool = True) -> RabbitNode:
    """A node of RabbitMQ 4.3; a light one has one scheduler."""
    return RabbitNode(
        folder, release=newer.unpacked(), erlang_flags=f"+S 1:1 {YIELDING}" if light else "", plugins=plugins
    )


@contextlib.contextmanager
def private_servers(
    *,
    rabbitmq: bool,
    postgres: bool,
    rabbitmq43: bool = False,
    cluster: bool = False,
    volatile: bool = False,
    plugins: tuple[str, ...] = (),
) -> Iterator[dict[str, str]]:
    """Their addresses, as BROKER_URL, MANAGEMENT_URL and DATABASE_URL; all start at the same time.

    Volatile ones keep their files in memory where there is room, and PostgreSQL never waits for the disk.
    With `plugins` the brokers are for measuring: 4.3 is not a light one then.
    """
    with work_folder(volatile=volatile) as folder:
        addresses: dict[str, str] = {}
        servers: list[Server | RabbitCluster] = []
        brokers: list[RabbitNode | RabbitCluster] = []
        try:
            if cluster:
                brokers.append(RabbitCluster(folder / "cluster"))
            if rabbitmq:
                flags = "" if plugins else YIELDING
                brokers.append(RabbitNode(folder / "rabbitmq", plugins=plugins, erlang_flags=flags))
            if rabbitmq43:
                node43 = node_of_43(folder / "rabbitmq43", plugins, light=not plugins)
                brokers.append(node43)
                addresses |= {"BROKER43_URL": node43.url, "MANAGEMENT43_URL": node43.management_url}
            servers += brokers
            for broker in brokers[:1]:
                addresses |= {"BROKER_URL": broker.url, "MANAGEMENT_URL": broker.management_url}
            if postgres:
                database = PostgresCluster(folder / "postgres", fsync=not volatile)
                servers.append(database)
                addresses["DATABASE_URL"] = database.url
            for server in servers:
                server.launch()
            for server in servers:
                server.wait_ready()
            yield addresses
        finally:
            for server in servers:
                server.abandon()


def hold(addresses: dict[str, str]) -> NoReturn:
    """Show the addresses as a shell reads them, and wait for the signal that ends us."""
    for name, url in addresses.items():
        print(f"{name}={shlex.quote(url)}", flush=True)
    print("Ctrl-C stops the servers and deletes their data.", file=sys.stderr)
    while True:
        signal.pause()


def run(command: list[str], environment: dict[str, str]) -> int:
    """The command's exit code; signals to us go on to it, and it decides when to end."""
    with subprocess.Popen(command, env=environment) as process:

        def forward(number: int, _: FrameType | None) -> None:
            # A terminal has sent Ctrl-C to the command as well; twice would make it give up its own cleaning.
            if number != signal.SIGINT or not _in_foreground():
                process.send_signal(number)

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, forward)
        code = process.wait()
    return code if code >= 0 else 128 - code


def _in_foreground() -> bool:
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def _give_up(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    runs = verbs.add_parser("run", help="run a command beside private servers")
    runs.add_argument("--rabbitmq", action="store_true")
    runs.add_argument("--rabbitmq43", action="store_true")
    runs.add_argument("--cluster", action="store_true", help="three RabbitMQ nodes, joined")
    runs.add_argument("--postgres", action="store_true")
    runs.add_argument("--plugin", action="append", default=[], help="one more plugin for the brokers")
    runs.add_argument("--volatile", action="store_true", help="keep their files in memory where there is room; faster")
    runs.add_argument("--prefix", default="DLQBATCH_TEST_", help="how the variables' names begin (%(default)s)")
    runs.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    verbs.add_parser("prepare43", help="fetch RabbitMQ 4.3, if that was not done yet")
    accept = verbs.add_parser("accepts", help="does the broker let this user in?")
    accept.add_argument("url")
    options = parser.parse_args(arguments)
    if options.verb == "accepts":
        return 0 if accepts(options.url) else UNREACHABLE
    # Until the command runs, a signal ends us through the `finally` of whatever has been started.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _give_up)
    try:
        if options.verb == "prepare43":
            newer.prepare()
            print(newer.tree())
            return 0
        command = options.command[1:] if options.command[:1] == ["--"] else options.command
        with (
            contextlib.ExitStack() as scratch,
            private_servers(
                rabbitmq=options.rabbitmq,
                rabbitmq43=options.rabbitmq43,
                cluster=options.cluster,
                postgres=options.postgres,
                volatile=options.volatile,
                plugins=tuple(options.plugin),
            ) as found,
        ):
            addresses = {options.prefix + name: url for name, url in found.items()}
            if options.volatile and command:
                # The folders of pytest's tmp_path; SQLite waits for the disk with every commit.
                addresses["PYTEST_DEBUG_TEMPROOT"] = str(scratch.enter_context(work_folder(volatile=True)))
            try:
                return run(command, os.environ | addresses) if command else hold(addresses)
            finally:
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not leave a server behind
    except ServiceError as error:
        print(f"services: {error}", file=sys.stderr)
        return UNREACHABLE
    except OSError as error:  # the command is not there, or is not a program
        print(f"services: {error}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
