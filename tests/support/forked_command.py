"""A command for pages whose lines are pasted into a shell: what it does is forked (forked_program.py).

The shell's part of it asks the tests' process, and prints what it answers; it has no input.
"""

from __future__ import annotations

import json
import shlex
import socketserver
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from forked_program import Warm
from program import HANDLER, HANGS_AFTER, environment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ASKS = """\
import json, os, socket, sys
with socket.create_connection(("127.0.0.1", {port})) as asked:
    asked.sendall(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode() + b"\\n")
    code, out, err = json.loads(b"".join(iter(lambda: asked.recv(65536), b"")))
os.write(1, out.encode())
os.write(2, err.encode())
sys.exit(code)
"""


class _Run(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        arguments, variables, folder = json.loads(self.rfile.readline())
        code, *said = Warm.of(HANDLER, environment()).run(arguments, variables, folder, 4 * HANGS_AFTER)
        self.wfile.write(json.dumps([code, *(part.decode() for part in said)]).encode())


@contextmanager
def forked_command(file: Path) -> Iterator[None]:
    """While this is open, `file` is a command that does what `python handler.py` does."""
    with socketserver.TCPServer(("127.0.0.1", 0), _Run) as server:
        asks = ASKS.format(port=server.server_address[1])
        file.write_text(f'#!/bin/sh\nexec {sys.executable} -IS -c {shlex.quote(asks)} "$@"\n')
        file.chmod(0o755)
        answers = threading.Thread(target=server.serve_forever)
        answers.start()
        try:
            yield
        finally:
            server.shutdown()
            answers.join()
