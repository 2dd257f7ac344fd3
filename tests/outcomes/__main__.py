"""Plays every situation of a retry on real brokers, and compares what is claimed with what was true.

Without options: on RabbitMQ 3.10 and 4.3, one after the other. Ends with 1 if anything false was claimed.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from dlqbatch import logs
from outcomes import page
from outcomes.situations import NEW, OLD, SITUATIONS
from outcomes.stage import SECONDS, WITHIN, Stage, told
from scripts import services
from scripts.servers.management import Management
from scripts.servers.rabbitmq import RabbitNode

if TYPE_CHECKING:
    from pathlib import Path

STATISTICS = "collect_statistics_interval = 5000\n"
"""RabbitMQ's own default: a broker of the tests refreshes them more often."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/outcomes", description=__doc__)
    parser.add_argument("--list", action="store_true", help="show the situations, and play none")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="this one; a part of a name will do"
    )
    parser.add_argument("--release", action="append", default=[], choices=(OLD, NEW), help="this RabbitMQ only")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="from the first send on")
    parser.add_argument(
        "--write", action="store_true", help="put what was found into docs/outcomes.json and docs/outcomes.md"
    )
    options = parser.parse_args()
    if options.list:
        for one in SITUATIONS:
            _say(f"{one.name:24} {' or '.join(one.expected):24} {one.title}")
        return 0
    logs.configure("error")
    good = True
    for release in options.release or (OLD, NEW):
        with services.work_folder() as folder:
            good &= _play(release, folder, options)
    if options.write:
        page.write()
    return int(not good)


def _play(release: str, folder: Path, options: argparse.Namespace) -> bool:
    nodes = (_node(release, folder / "one"), _node(release, folder / "other"))
    try:
        for node in nodes:
            node.start()
        stage = Stage(
            nodes[0].url.rpartition("/")[0], nodes[0].management_url, nodes[1].management_url, folder, release
        )
        try:
            plays = stage.play(options.only, options.seconds)
        finally:
            stage.close()
        version = Management(nodes[0].management_url).get("overview")["rabbitmq_version"]
    finally:
        for node in nodes:
            node.abandon()
    for one in plays:
        _say(f"{version} {told(one)}")
    for deployment in stage.deployments.values():
        for failure in dict.fromkeys(deployment.failures):
            _say(f"{version} {deployment.name}: {failure}")
    if options.write:
        page.keep(plays, release, version)
    late = [one for one in plays if one.is_late]
    for one in late:
        _say(
            f"{version} {one.title}: resolved {one.took:.0f} s after its acknowledgement, and {WITHIN:.0f} are promised"
        )
    return not late and not any(one.problems for one in plays)


def _node(release: str, folder: Path) -> RabbitNode:
    node = RabbitNode(folder) if release == OLD else services.node_of_43(folder)
    node.config = node.config.replace("collect_statistics_interval = 500\n", STATISTICS)
    return node


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
