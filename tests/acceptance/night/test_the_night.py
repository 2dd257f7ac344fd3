"""The bad night of docs/the-night.md: its commands are typed in their order, and then every message is counted.

`DLQBATCH_TEST_NIGHT=10000 scripts/test tests/acceptance/night -rP` is the whole night, and prints how long it took.
"""

from __future__ import annotations

import re
import shlex
import sys
import time
from typing import TYPE_CHECKING

import pytest
from night_scene import MENDED, Night, Size, messages, night_of
from program import HANGS_AFTER, ROOT, Client, Finished, eventually

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

PAGE = (ROOT / "docs" / "the-night.md").read_text()
STEPS = {
    number: "".join(re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)).splitlines()
    for number, text in re.findall(r"^## (\d)\. .*?$(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
}
MOST_COMMANDS = 20
STOPPED = 1
JOBS = {"drain": "1m", "ingest": "10s", "lifecycle": "6s"}


class Terminal:
    """Types command lines, with what earlier ones have printed."""

    def __init__(self, night: Night) -> None:
        self.night = night
        self.commands = 0
        self.chosen: dict[str, str] = {}

    def type(self, line: str, code: int = 0) -> Finished:
        done = self.night.program.run(*self._words(line), cwd=self.night.folder)
        assert done.code == code, f"{line}\n{done.said}"
        if actions := re.findall(r"\bA-\d+\b", done.said):
            self.chosen["ACTION"] = actions[-1]
        if plan := re.search(r"^plan (\w+)$", done.said, re.MULTILINE):
            self.chosen["HASH"] = plan[1]
        return done

    def start(self, line: str) -> subprocess.Popen[str]:
        """In another terminal."""
        return self.night.program.start(*self._words(line.removesuffix("&")))

    def _words(self, line: str) -> list[str]:
        self.commands += 1
        for name, value in self.chosen.items():
            line = re.sub(rf"\b{name}\b", value, line)
        program, *words = shlex.split(line)
        assert program == "dlqbatch", line
        return words


@pytest.fixture
def night(
    broker_url: str, broker_addresses: tuple[str, str], team: Client, database_url: str, tmp_path: Path
) -> Iterator[Night]:
    servers = {"broker_url": broker_url, "management_url": broker_addresses[1], "database_url": database_url}
    with night_of(Size(messages(1000)), servers, team, tmp_path, JOBS) as scene:
        yield scene


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_night_takes_twenty_commands_and_loses_and_doubles_nothing(night: Night) -> None:
    night.happen()
    terminal, size = Terminal(night), night.size
    began = time.monotonic()

    _, groups = [terminal.type(line) for line in STEPS["1"]]
    unknown = [line.split()[0] for line in groups.out.splitlines() if "KeyError" in line]
    for line, terminal.chosen["GROUP"] in zip(STEPS["2"], unknown, strict=True):
        terminal.type(line)

    night.mend("limit-is-over")
    for line in STEPS["3"]:
        terminal.type(line)

    (night.folder / "paid.txt").write_text(size.listed)
    for line in STEPS["4"]:
        terminal.type(line)

    archived = night.states()["archived"]
    wrong, undo, right = STEPS["5"]
    terminal.chosen["NUMBER"] = str(size.timed_out)
    terminal.type(wrong)
    terminal.type(undo)
    assert night.states()["archived"] == archived
    terminal.chosen["NUMBER"] = str(size.payments - MENDED)
    terminal.type(right)

    sent = night.sent
    plan, too_early, abort = STEPS["6"]
    terminal.type(plan)
    process = terminal.start(too_early)
    assert eventually(lambda: night.sent > sent)
    terminal.type(abort)
    process.communicate(timeout=HANGS_AFTER)
    assert eventually(lambda: "processing" not in night.states())

    night.mend("inventory-is-back")
    plan, apply, head, go_on = STEPS["7"]
    terminal.type(plan)
    stopped = terminal.type(apply, STOPPED)
    for line in (head.partition(" --note")[0], go_on.replace("HASH", terminal.chosen["HASH"])):
        assert f"`{line}`" in stopped.out, "the way out is named, to be pasted"
    terminal.type(head)
    assert eventually(lambda: night.is_at_work("orders"))
    terminal.type(go_on)
    (done,) = STEPS["8"]
    terminal.type(done)
    seconds = time.monotonic() - began

    night.assert_all_is_accounted_for()
    assert terminal.commands <= MOST_COMMANDS
    sys.stdout.write(f"{size.total:,} messages, {terminal.commands} command lines, {seconds:.0f} s\n")
