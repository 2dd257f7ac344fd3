"""Every command with something to do, one after the other in one process: an interpreter for each would cost more."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from forked_program import Warm
from program import HANDLER, HANGS_AFTER, ROOT, environment
from typer.main import get_command

from dlqbatch.cli.commands import application

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


class Step(NamedTuple):
    """One command, or an event for the handler, with settings that differ from the others'."""

    call: tuple[str, ...] | dict[str, Any]
    settings: Mapping[str, str] = {}
    breaks: str = ""
    """An error of nobody's that the run dies of, with this text."""


# Each command in the same process: an interpreter and its imports would cost more than all of them.
DRIVER = """
import json, logging, os, sys
sys.path.insert(0, {root!r})
from dlqbatch import cli, jobs
import handler
base, run = dict(os.environ), jobs.run
for number, (call, environ, breaks) in enumerate(json.load(open(sys.argv[1]))):
    os.environ.clear(); os.environ.update(base | environ)
    logging.root.handlers[:] = []
    def fail(*_, **__):
        try:
            raise ValueError(breaks)
        except ValueError as error:
            raise RuntimeError("it happened while " + breaks) from error
    jobs.run = fail if breaks else run
    code = None
    try:
        if isinstance(call, dict):
            print(json.dumps(handler.handler(call)))
        else:
            code = cli.main(call)
    except SystemExit as error:
        code = error.code
    except BaseException as error:
        # What the platform's own log shows.
        sys.excepthook(*sys.exc_info())
        code = type(error).__name__
    for stream in sys.stdout, sys.stderr:
        print(f"\\n=== {{number}} ended with {{code}}", file=stream, flush=True)
"""


@dataclass(slots=True)
class Said:
    out: bytes
    err: bytes
    codes: list[str] = field(default_factory=list)


def run_all(steps: list[Step], settings: Mapping[str, str], variables: Mapping[str, str], folder: Path) -> Said:
    """What each of them said; `variables` are those of others than dlqbatch."""
    plan = []
    for number, step in enumerate(steps):
        # Both forms of the logs, turn by turn: twice as many commands would find no more.
        given = {"log_format": ("text", "json")[number % 2]} | dict(step.settings)
        plan.append((step.call, {f"DLQBATCH_{name.upper()}": text for name, text in given.items()}, step.breaks))
    file = folder / "steps.json"
    file.write_text(json.dumps(plan))
    script = DRIVER.format(root=str(ROOT))
    code, out, err = Warm.of(HANDLER, environment()).run(
        [str(file)], environment(**settings) | dict(variables), str(folder), 2 * HANGS_AFTER, script
    )
    file.unlink()
    assert code == 0, (out[-2000:], err[-2000:])
    ends = [line.rpartition(b" ")[2].decode() for line in out.splitlines() if line.startswith(b"=== ")]
    assert len(ends) == len(steps)
    return Said(out, err, ends)


def leaves(command: Any, *path: str) -> Iterator[tuple[str, ...]]:
    inner = getattr(command, "commands", {})
    if not inner:
        yield path
    for name, each in inner.items():
        yield from leaves(each, *path, name)


ALONE = {("console",), ("demo",)}
"""Commands that have processes and a time of their own, and tests of their own."""


def everything(folder: Path) -> list[Step]:
    """Every command with something to do, as far as it needs no time of its own."""
    calls = """
        db sql|db grants|db grants --json|db current|db upgrade|db current --json|db backfill-fields
        topology plan|topology apply|topology export|topology plan --json
        events set orders.* 0|events list|events test orders.x|rules list|rules set mine --pattern xx --strategy manual
        rules test --text xx|rules remove mine|drain --dry-run|drain|ingest --dry-run|ingest|check|check --json
        messages search body|messages search body --body
        messages list|messages list --json|messages groups|messages show 1 --full|messages journal
        messages erase 1 --reason r --dry-run
        messages discard 1 --reason r --yes|messages restore 1 --reason r|lifecycle|lifecycle --json|monitor --json
        monitor|status|status --json|replay plan --all --reason r --mended INC-1|replay status
        messages replay 2 --reason r
        ingest orders-queue --head --dry-run|peek orders-queue|peek orders-queue --json
        retain|archive list --verify|archive show 3 --full|archive restore 3 --reason r|doctor|doctor --json
        upgrade-check|upgrade-check --json
        groups list|groups list --json|groups hold a --reason r|groups unhold a
        groups ack a|groups note a words|actions list|actions list --json|actions show A-1|undo A-1
        actions show A-1 --json|schedule --dry-run|events remove orders.*
    """
    steps = [Step(tuple(call.split())) for line in calls.split("\n") for call in line.strip().split("|") if call]
    # Nobody knows how their names begin.
    steps += [Step(("groups", "show", digit)) for digit in "0123456789abcdef"]
    steps += [Step({"job": job}) for job in ("drain", "ingest", "check", "lifecycle", "replay", "monitor", "retain")]
    steps += [Step(("messages", "edit", "2", "--body-file", str(folder / "body"), "--reason", "r", "--json"))]
    steps += [Step(("replay", verb, "0" * 12)) for verb in ("apply", "release", "abort", "pause", "resume")]
    steps += [Step(("replay", "approve", "0" * 12, "--reason", "r")), Step(("replay", "run"))]
    steps += [
        Step(("replay", "rate", "0" * 12, "5/s")),
        Step(("events", "simulate", "orders.created=3")),
        Step(("topology", "delete")),
    ]
    return steps


def every_command() -> set[tuple[str, ...]]:
    return set(leaves(get_command(application())))
