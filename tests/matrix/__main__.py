"""Breaks things again and again, and counts what became of every message.

Without options: every fault, as often as it says itself, on RabbitMQ 3.10 and 4.3. Ends with 1 if anything was lost,
changed, or doubled without need.
"""

from __future__ import annotations

import argparse
import platform
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dlqbatch import logs
from matrix import page
from matrix.ground import Servers
from matrix.rounds import Found, many
from matrix.scenario import RELEASES, Fault, faults
from scripts import services
from scripts.servers.management import Management

if TYPE_CHECKING:
    from collections.abc import Iterable

FAILURES = Path(__file__).resolve().parents[2] / "build" / "faults"


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/faults", description=__doc__)
    parser.add_argument("--list", action="store_true", help="show the faults, and break nothing")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="this one; a part of a name will do"
    )
    parser.add_argument("--kind", action="append", default=[], help="classic, quorum, postgresql or sqlite only")
    parser.add_argument("--release", action="append", default=[], choices=RELEASES, help="this RabbitMQ only")
    parser.add_argument("--runs", type=int, help="rounds of each fault, in place of its own number")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no new round of a fault after so long")
    parser.add_argument("--seed", default=secrets.token_hex(4), help="repeat the rounds of this seed")
    parser.add_argument(
        "--write", action="store_true", help="put what was found into docs/reliability.json and docs/reliability.md"
    )
    parser.add_argument(
        "--page", action="store_true", help="break nothing, and write docs/reliability.md from docs/reliability.json"
    )
    options = parser.parse_args()
    chosen = [one for one in faults().values() if not options.only or any(part in one.name for part in options.only)]
    if options.list:
        for one in chosen:
            _say(f"{one.name:45} {one.job:10} {','.join(one.kinds):20} {one.runs:4} runs  {one.title}")
        return 0
    if options.page:
        page.write()
        return 0
    if not chosen:
        parser.error("no fault has such a name; --list shows all")
    logs.configure("error")
    _say(f"seed {options.seed}; failures go to {FAILURES}")
    good = True
    for release in options.release or RELEASES:
        with services.work_folder() as folder, Servers(folder, release) as servers:
            good &= _break(chosen, servers, options)
    if options.write:
        page.write()
    return int(not good)


def _break(chosen: Iterable[Fault], servers: Servers, options: argparse.Namespace) -> bool:
    good = True
    for one in chosen:
        if servers.release not in one.releases:
            continue
        for kind in one.kinds:
            if options.kind and kind not in options.kind:
                continue
            runs = options.runs or one.runs
            found = many(one, servers, kind, options.seed, runs, options.seconds, FAILURES)
            good &= found.is_good
            _say(_line(found))
            if options.write:
                page.keep([found], _versions(servers))
    return good


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _line(found: Found) -> str:
    allowed = "any" if found.allowed is None else found.allowed
    words = (
        f"{found.runs} runs, {found.hits} hits, {found.messages} messages: {found.lost} lost, {found.changed} changed, "
    )
    words += f"{found.doubled} doubled of {allowed}" + (f", {found.gone} taken by others" if found.gone else "")
    end = (
        ""
        if found.is_good
        else f" FAILED {found.failed}: " + "; ".join(f"{each['seed']}: {each['why']}" for each in found.failures[:3])
    )
    return f"{found.release} {found.kind} {found.fault}: {words} ({found.seconds:.0f} s){end}"


def _versions(servers: Servers) -> dict[str, str]:
    found = {"python": platform.python_version()}
    found["rabbitmq"] = Management(servers.broker[1]).get("overview")["rabbitmq_version"]
    return found


if __name__ == "__main__":
    sys.exit(main())
