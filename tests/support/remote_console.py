"""A console as a process, and the program as an operator has it elsewhere: with its address and a token, no more."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from program import Program

from dlqbatch.console.logins import token_line
from dlqbatch.console.rights import Role

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path


class Remote(NamedTuple):
    console: subprocess.Popen[str]
    address: str
    program: Program
    """It knows neither a broker nor a database."""
    tokens: Path
    """The file of tokens, whose lines count while they stand there."""

    def but_as(self, folder: Path, role: Role, *, ends_in: timedelta = timedelta(hours=1)) -> Program:
        """The same with a token of this role."""
        token, line = token_line(f"the-{role.word}", role, may_reveal=False, ends=datetime.now(UTC) + ends_in)
        with self.tokens.open("a") as file:
            file.write(line + "\n")
        return self.program.but(remote_token_file=str(_kept(folder, token)))


def remote_console(program: Program, folder: Path, name: str = "ann") -> Remote:
    """A console with the settings of this program, and an operator who may do everything there."""
    token, line = token_line(name, Role.ADMIN, may_reveal=True, ends=datetime.now(UTC) + timedelta(hours=1))
    tokens = folder / "tokens"
    tokens.write_text(line + "\n")
    process = program.but(console_address="127.0.0.1:0", console_tokens=str(tokens)).start("console", "--json")
    assert process.stdout is not None
    said = process.stdout.readline()
    assert said, process.communicate()[1]
    address = str(json.loads(said)["address"])
    away = Program(
        {"remote": address, "remote_token_file": str(_kept(folder, token)), "log_format": "text"}, program.command
    )
    return Remote(process, address, away, tokens)


def _kept(folder: Path, token: str) -> Path:
    file = folder / f"token-{token[-6:]}"
    file.write_text(token + "\n")
    file.chmod(0o600)
    return file
