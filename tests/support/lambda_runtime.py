"""AWS Lambda's side of a function: the Runtime API that hands out events, and the folder and variables it runs in.

The runtime itself is AWS's own, `python -m awslambdaric handler.handler`; nothing of it is replaced.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Self

from program import HANGS_AFTER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT: Final = Path(__file__).resolve().parents[2]
API: Final = "/2018-06-01/runtime/"
ARN: Final = "arn:aws:lambda:eu-central-1:123456789012:function:dlqbatch-drain"


@dataclass(frozen=True, slots=True)
class Answer:
    """What the runtime posted for one event."""

    how: str
    """`response` or `error`."""
    text: str
    headers: Mapping[str, str]
    """By their names in small letters."""
    seconds_left: float
    """Of the time that the function had for it, when it came."""

    @property
    def report(self) -> dict[str, Any]:
        assert self.how == "response", self.text
        told: dict[str, Any] = json.loads(self.text)
        return told

    @property
    def error(self) -> dict[str, Any]:
        assert self.how == "error", self.text
        told: dict[str, Any] = json.loads(self.text)
        cause = json.loads(self.headers["lambda-runtime-function-xray-error-cause"])
        assert [one["type"] for one in cause["exceptions"]] == [told["errorType"]]
        return told


@dataclass(frozen=True, slots=True)
class _Invocation:
    event: object
    seconds: float
    id: str = field(default_factory=lambda: str(uuid.uuid4()))


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A container that is killed leaves its connection behind.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class RuntimeApi:
    """Serves events to one function, one after the other."""

    def __init__(self) -> None:
        self.asked_at: list[float] = []
        self._invocations: queue.Queue[_Invocation | None] = queue.Queue()
        self._answers: queue.Queue[tuple[str, Answer]] = queue.Queue()
        self._deadline = time.time() + HANGS_AFTER
        self._server = _Server(("127.0.0.1", 0), self._handler())
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._invocations.put(None)
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def invoke(self, event: object, seconds: float) -> Answer:
        """Send one event, after which the platform would end the function in so many seconds.

        They begin when the function takes the event: the start of a container has a time of its own.
        """
        invocation = _Invocation(event, seconds)
        self._invocations.put(invocation)
        answered, answer = self._answers.get(timeout=2 * HANGS_AFTER)
        assert answered in {invocation.id, "init"}, f"{answered} was answered, {invocation.id} was asked"
        return answer

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                assert self.path == f"{API}invocation/next"
                api.asked_at.append(time.monotonic())
                invocation = api._invocations.get()
                if invocation is None:
                    self.close_connection = True
                    return
                body = json.dumps(invocation.event).encode()
                api._deadline = time.time() + invocation.seconds
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Lambda-Runtime-Aws-Request-Id", invocation.id)
                self.send_header("Lambda-Runtime-Deadline-Ms", str(int(api._deadline * 1000)))
                self.send_header("Lambda-Runtime-Invoked-Function-Arn", ARN)
                self.send_header("Lambda-Runtime-Trace-Id", "Root=1-5bef4de7-ad49b0e87f6ef6c87fc2e700;Sampled=0")
                self.end_headers()
                # The function may have been ended meanwhile.
                with contextlib.suppress(OSError):
                    self.wfile.write(body)

            def do_POST(self) -> None:
                text = self.rfile.read(int(self.headers["Content-Length"])).decode()
                invocation, _, how = self.path.removeprefix(API).removeprefix("invocation/").rpartition("/")
                headers = {name.lower(): value for name, value in self.headers.items()}
                answer = Answer(how, text, headers, api._deadline - time.time())
                accepted = b'{"status": "OK"}'
                self.send_response(202)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(accepted)))
                self.end_headers()
                self.wfile.write(accepted)
                api._answers.put((invocation, answer))

            def log_message(self, *_: object) -> None:
                """Nobody reads it."""

        return Handler


def package(folder: Path, properties: str) -> Path:
    """The folder that a deployment unpacks into: what runs, its settings file, and nothing else."""
    task = folder / "task"
    shutil.copytree(ROOT / "dlqbatch", task / "dlqbatch", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "handler.py", task)
    (task / "application.properties").write_text(properties)
    return task


class Function:
    """One container of a function: cold at first, warm after its first event, frozen between two of them."""

    def __init__(
        self,
        task: Path,
        settings: Mapping[str, str],
        environ: Mapping[str, str] = MappingProxyType({}),
        prefix: Sequence[str] = (),
    ) -> None:
        """Run in `task`, with these settings and these variables of AWS's own; `prefix` is a command that starts it."""
        self._api = RuntimeApi()
        self._environ, self._prefix = environ, prefix
        self._log = task.parent / f"function-{uuid.uuid4().hex}.log"
        self._task = task
        self._settings = {f"DLQBATCH_{name.upper()}": value for name, value in settings.items()}

    def __enter__(self) -> Self:
        self._api.__enter__()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*self._prefix, sys.executable, "-m", "awslambdaric", "handler.handler"],
                cwd=self._task,
                env={**self._platform(), **self._environ, **self._settings},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # the platform gives no notice either
        self._process.wait()
        self._api.__exit__()

    @property
    def asked_at(self) -> Sequence[float]:
        """When it asked for each event, on the monotonic clock."""
        return self._api.asked_at

    @property
    def pid(self) -> int:
        """Of the container's process; it is still running."""
        assert self._process.poll() is None, self.logged()
        return self._process.pid

    def send(self, event: object, seconds: float = HANGS_AFTER) -> Answer:
        return self._api.invoke(event, seconds)

    def logged(self) -> list[str]:
        """Every line that the platform's log would hold."""
        return self._log.read_text().splitlines()

    def _platform(self) -> dict[str, str]:
        """The variables that Lambda sets, and no other."""
        return {
            "AWS_LAMBDA_RUNTIME_API": self._api.address,
            "_HANDLER": "handler.handler",
            "LAMBDA_TASK_ROOT": str(self._task),
            "LAMBDA_RUNTIME_DIR": "/var/runtime",
            "AWS_EXECUTION_ENV": "AWS_Lambda_python3.11",
            "AWS_LAMBDA_FUNCTION_NAME": "dlqbatch-drain",
            "AWS_LAMBDA_FUNCTION_VERSION": "$LATEST",
            "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": "256",
            "AWS_LAMBDA_INITIALIZATION_TYPE": "on-demand",
            "AWS_LAMBDA_LOG_FORMAT": "JSON",
            "AWS_LAMBDA_LOG_GROUP_NAME": "/aws/lambda/dlqbatch-drain",
            "AWS_LAMBDA_LOG_STREAM_NAME": "2026/03/01/[$LATEST]4c8d9e0f",
            "AWS_REGION": "eu-central-1",
            "AWS_DEFAULT_REGION": "eu-central-1",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_SESSION_TOKEN": "testing",
            "TZ": ":UTC",
            "LANG": "en_US.UTF-8",
            "PATH": os.environ.get("PATH", os.defpath),
            "PYTHONDONTWRITEBYTECODE": "1",  # the task's folder cannot be written there
            "PYTHONWARNINGS": "error",
        }
