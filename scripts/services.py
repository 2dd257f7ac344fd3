#!/usr/bin/env python3
"""Runs a command beside private servers: `scripts/services.py run --rabbitmq --postgres -- COMMAND...`.

The command finds them in DLQBATCH_TEST_BROKER_URL, DLQBATCH_TEST_MANAGEMENT_URL and DLQBATCH_TEST_DATABASE_URL (another
beginning of the names with --prefix), and its exit code is ours; 4 if a server did not start.
`scripts/services.py accepts URL` ends with 0 if the AMQP broker at URL lets its user in.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":  # it is run as a file, from any folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from scripts.servers.amqp import accepts
from scripts.servers.postgres import PostgresCluster
from scripts.servers.rabbitmq import RabbitNode
from scripts.servers.server import Guard, Server, ServiceError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

UNREACHABLE = 4  # as the program itself ends when a broker or a database cannot be reached


@contextlib.contextmanager
def work_folder() -> Iterator[Path]:
    """A short path that every user can walk to, deleted afterwards, even if we are killed."""
    folder = Path(tempfile.mkdtemp(prefix="dlqbatch-", dir="/tmp"))
    try:
        folder.chmod(0o711)
        Guard.tell(f"remove {folder}")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def private_servers(*, rabbitmq: bool, postgres: bool, fsync: bool = True) -> Iterator[dict[str, str]]:
    """Their addresses, as BROKER_URL, MANAGEMENT_URL and DATABASE_URL; both start at the same time."""
    with work_folder() as folder:
        addresses: dict[str, str] = {}
        servers: list[Server] = []
        try:
            if rabbitmq:
                node = RabbitNode(folder / "rabbitmq")
                servers.append(node)
                addresses |= {"BROKER_URL": node.url, "MANAGEMENT_URL": node.management_url}
            if postgres:
                cluster = PostgresCluster(folder / "postgres", fsync=fsync)
                servers.append(cluster)
                addresses["DATABASE_URL"] = cluster.url
            for server in servers:
                server.launch()
            for server in servers:
                server.wait_ready()
            yield addresses
        finally:
            for server in servers:
                server.abandon()


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
    runs.add_argument("--postgres", action="store_true")
    runs.add_argument("--no-fsync", action="store_true", help="let PostgreSQL lose data in a power cut; faster")
    runs.add_argument("--prefix", default="DLQBATCH_TEST_", help="how the variables' names begin (%(default)s)")
    runs.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    accept = verbs.add_parser("accepts", help="does the broker let this user in?")
    accept.add_argument("url")
    options = parser.parse_args(arguments)
    if options.verb == "accepts":
        return 0 if accepts(options.url) else UNREACHABLE
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("no COMMAND to run")
    # Until the command runs, a signal ends us through the `finally` of whatever has been started.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _give_up)
    try:
        with private_servers(
            rabbitmq=options.rabbitmq, postgres=options.postgres, fsync=not options.no_fsync
        ) as addresses:
            try:
                return run(command, os.environ | {options.prefix + name: url for name, url in addresses.items()})
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
