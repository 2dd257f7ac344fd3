"""The commands of `doctor`, pasted: what a shell would do with them, by the management API and by the program itself.

A program of Erlang takes seconds to start; tests that paste hundreds of commands cannot wait for that.
"""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from scripts.servers.management import quoted

if TYPE_CHECKING:
    from collections.abc import Callable

    from program import Program

    from scripts.servers.management import Management


class CannotPaste(AssertionError):
    """The command is none that is known here, or it failed."""


class Shell:
    def __init__(self, management: Management, program: Program, depth: Callable[[str], int]) -> None:
        self._management = management
        self._program = program
        self._depth = depth

    def paste(self, line: str) -> None:
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|")
        lexer.whitespace_split = True
        command: list[str] = []
        for word in [*lexer, "&&"]:
            if word not in {"&&", "|"}:
                command.append(word)
                continue
            self._run(command)
            command = []

    def _run(self, words: list[str]) -> None:
        if words[0].startswith("queue="):  # awk: goes on if this queue is empty
            if self._depth(words[0].removeprefix("queue=")):
                raise CannotPaste(words)
        elif words[0] == "curl":
            self._curl(words)
        elif words[0] == "rabbitmqctl":
            self._rabbitmqctl(words[1], words[2:])
        elif words[0] == "dlqbatch":
            done = self._program.run(*words[1:])
            if done.code != 0:
                raise CannotPaste(words, done.said)
        else:
            raise CannotPaste(words)

    def _curl(self, words: list[str]) -> None:
        method = words[words.index("-X") + 1]
        body = json.loads(words[words.index("-d") + 1]) if "-d" in words else None
        for word in words:
            if not word.startswith("http://"):
                continue
            parts = urlsplit(word)
            path = parts.path.removeprefix("/api/") + (f"?{parts.query}" if parts.query else "")
            self._management._request(method, path, body)

    def _rabbitmqctl(self, command: str, words: list[str]) -> None:
        api, vhost = self._management, quoted(self._management.vhost)
        options: dict[str, str] = {}
        rest: list[str] = []
        given = iter(words)
        for word in given:
            if word in {"--if-empty", "-q"}:
                options[word] = ""
            elif word.startswith("-"):
                options[word] = next(given)
            else:
                rest.append(word)
        if command in {"set_policy", "set_operator_policy"}:
            name, pattern, definition = rest
            body = {"pattern": pattern, "definition": json.loads(definition), "apply-to": options["--apply-to"]}
            kind = "policies" if command == "set_policy" else "operator-policies"
            api.put(f"{kind}/{vhost}/{quoted(name)}", {**body, "priority": int(options["--priority"])})
        elif command == "clear_operator_policy":
            api.delete(f"operator-policies/{vhost}/{quoted(rest[0])}")
        elif command == "delete_queue":
            api.delete(f"queues/{vhost}/{quoted(rest[0])}" + ("?if-empty=true" if "--if-empty" in options else ""))
        elif not command.startswith("list_"):
            raise CannotPaste(command)
