"""A private RabbitMQ node on loopback, with its own epmd, cookie, ports and data."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .amqp import accepts
from .management import Management, ManagementError
from .server import HANGS_AFTER, LOOPBACK, Server, ServiceError, free_ports

if TYPE_CHECKING:
    import signal

MISSING = (
    "no rabbitmq-server is installed. On Debian or Ubuntu: sudo apt-get install rabbitmq-server "
    "(its own broker is not needed: sudo systemctl disable --now rabbitmq-server)."
)
# Small and quick rather than tuned: statistics twice a second, and no alarm on a nearly full development disk.
CONFIG = """\
listeners.tcp.1 = {host}:{port}
management.tcp.ip = {host}
management.tcp.port = {management_port}
collect_statistics_interval = 500
disk_free_limit.absolute = 50MB
"""

YIELDING = "+sbwt none +sbwtdcpu none +sbwtdio none"
"""Erlang waits for work without a loop that keeps a core from all others; for measuring it may have its loop."""


@dataclass(frozen=True, slots=True)
class Release:
    """One RabbitMQ on this machine, with the Erlang it runs on."""

    sbin: Path
    erlang: Path | None = None
    """The folder of `erl` and `epmd`, if they are not those of the machine."""

    @property
    def path(self) -> str:
        """What PATH has to be for its scripts to find its Erlang."""
        machine = os.environ.get("PATH", os.defpath)
        return f"{self.erlang}{os.pathsep}{machine}" if self.erlang else machine


def installed_sbin() -> Path:
    """The folder of an installed broker's own scripts."""
    # Debian's scripts in /usr/sbin change to the user rabbitmq; those in /usr/lib do not.
    folders = [Path("/usr/lib/rabbitmq/bin")]
    folders += sorted(Path("/").glob("usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin"), reverse=True)
    folders += sorted(Path("/").glob("opt/rabbitmq*/sbin"), reverse=True)
    on_path = shutil.which("rabbitmq-server")
    if on_path and Path(on_path).resolve().name == "rabbitmq-server":
        folders.append(Path(on_path).resolve().parent)
    for folder in folders:
        if os.access(folder / "rabbitmq-server", os.X_OK) and (folder / "rabbitmq-env").exists():
            return folder
    raise ServiceError(MISSING)


class Epmd(Server):
    """Erlang's port mapper, one per node or one for a cluster's nodes."""

    title = "epmd"

    def __init__(self, folder: Path, port: int | None = None, release: Release | None = None) -> None:
        super().__init__(folder)
        self.port = port or free_ports(1)[0]
        self.log = folder / "epmd.log"
        self.path = release.path if release else None

    def launch(self) -> None:
        installed = Path("/usr/lib/erlang").glob("erts-*/bin/epmd")
        program = shutil.which("epmd", path=self.path) or next(map(str, installed), None)
        if program is None:
            raise ServiceError("Erlang's epmd is not installed; it comes with rabbitmq-server.")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.spawn([program, "-address", LOOPBACK, "-port", str(self.port)], {"PATH": os.defpath})

    def ready(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, self.port), 1.0):
            return True
        return False


class RabbitNode(Server):
    """One broker node; `release` may be another one than the installed."""

    title = "RabbitMQ"

    def __init__(
        self,
        folder: Path,
        *,
        release: Release | None = None,
        name: str | None = None,
        port: int | None = None,
        management_port: int | None = None,
        epmd: Epmd | None = None,
        cookie: str | None = None,
        config: str = "",
        erlang_flags: str = YIELDING,
        plugins: tuple[str, ...] = (),
    ) -> None:
        super().__init__(folder)
        self.release = release or Release(installed_sbin())
        self.sbin = self.release.sbin
        spare = free_ports(4)
        self.port = port or spare[0]
        self.management_port = management_port or spare[1]
        self.distribution_port = spare[2]
        self.name = name or f"dlqbatch-{self.port}@localhost"
        self.log = folder / "node.log"
        self.cookie = cookie or secrets.token_hex(16)
        self.config = CONFIG.format(host=LOOPBACK, port=self.port, management_port=self.management_port) + config
        self.erlang_flags = erlang_flags
        self.plugins = ("rabbitmq_management", *plugins)
        self._own_epmd = Epmd(folder, spare[3], self.release) if epmd is None else None
        self.epmd_port = spare[3] if epmd is None else epmd.port

    @property
    def url(self) -> str:
        """The default virtual host, as guest."""
        return f"amqp://guest:guest@{LOOPBACK}:{self.port}/%2F"

    @property
    def management_url(self) -> str:
        return f"http://guest:guest@{LOOPBACK}:{self.management_port}"

    @property
    def environment(self) -> dict[str, str]:
        """What the node runs with, and what rabbitmqctl needs to reach it."""
        settings = {
            "NODENAME": self.name,
            "NODE_IP_ADDRESS": LOOPBACK,
            "NODE_PORT": str(self.port),
            "DIST_PORT": str(self.distribution_port),
            "MNESIA_BASE": str(self.folder / "data"),
            "MNESIA_DIR": str(self.folder / "data" / "node"),
            "PLUGINS_EXPAND_DIR": str(self.folder / "plugins-expanded"),
            "LOG_BASE": str(self.folder),
            "LOGS": "-",  # to stdout, where what goes wrong before there is a log goes as well
            "PID_FILE": str(self.folder / "node.pid"),
            "CONFIG_FILE": str(self.folder / "rabbitmq.conf"),
            "CONFIG_FILES": str(self.folder / "conf.d"),
            "ADVANCED_CONFIG_FILE": str(self.folder / "advanced.config"),
            "GENERATED_CONFIG_DIR": str(self.folder / "generated"),
            "ENABLED_PLUGINS_FILE": str(self.folder / "enabled_plugins"),
            "CONF_ENV_FILE": str(self.folder / "rabbitmq-env.conf"),
            "SERVER_ADDITIONAL_ERL_ARGS": (
                f"-start_epmd false -kernel inet_dist_use_interface {{127,0,0,1}} {self.erlang_flags}"
            ),
        }
        # Nothing is inherited but the path: an RABBITMQ_ variable of the caller's must not bend this node.
        return {f"RABBITMQ_{key}": value for key, value in settings.items()} | {
            "PATH": self.release.path,
            "LANG": "C.UTF-8",
            "HOME": str(self.folder),
            "ERL_EPMD_PORT": str(self.epmd_port),
            "ERL_EPMD_ADDRESS": LOOPBACK,
        }

    def launch(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        cookie = self.folder / ".erlang.cookie"
        if not cookie.exists():
            cookie.write_text(self.cookie)
            cookie.chmod(0o400)  # Erlang refuses a cookie that others can read
        (self.folder / "rabbitmq.conf").write_text(self.config)
        (self.folder / "enabled_plugins").write_text(f"[{','.join(self.plugins)}].\n")
        (self.folder / "rabbitmq-env.conf").touch()
        if self._own_epmd is not None:
            self._own_epmd.start()
        # "Under systemd" the script replaces itself by the Erlang machine, so that our process id is the broker's;
        # else a shell stays between them, and its own handling of signals.
        self.spawn([str(self.sbin / "rabbitmq-server")], self.environment | {"RUNNING_UNDER_SYSTEMD": "true"})

    def ready(self) -> bool:
        if not accepts(self.url):
            return False
        try:
            Management(self.management_url).get("overview")
        except (OSError, ManagementError):
            return False
        return True

    def control(self, *words: str) -> None:
        """Run one command of rabbitmqctl."""
        command = [str(self.sbin / "rabbitmqctl"), "--quiet", "--node", self.name, *words]
        subprocess.run(command, env=self.environment, check=True, capture_output=True, timeout=HANGS_AFTER)

    def evaluate(self, expression: str) -> None:
        """Run Erlang in the node, as `rabbitmqctl eval` does; that program needs seconds of CPU time to start."""
        installed = Path("/usr/lib/erlang").glob("erts-*/bin/erl_call")
        program = shutil.which("erl_call", path=self.release.path) or next(map(str, installed), None)
        if program is None:
            raise ServiceError("Erlang's erl_call is not installed; it comes with rabbitmq-server.")
        cookie = (self.folder / ".erlang.cookie").read_text()
        # The address needs no epmd.
        command = [program, "-c", cookie, "-address", f"{LOOPBACK}:{self.distribution_port}", "-e"]
        done = subprocess.run(
            command,
            env=self.environment,
            input=f"{expression}\n",
            capture_output=True,
            text=True,
            timeout=HANGS_AFTER,
            check=False,
        )
        if done.returncode or not done.stdout.startswith("{ok,"):
            raise ServiceError(f"{self.name} cannot do {expression}: {done.stdout}{done.stderr}")

    def set_memory_limit(self, share: float) -> None:
        """The share of the machine's memory above which the node raises its memory alarm."""
        self.evaluate(f"vm_memory_monitor:set_vm_memory_high_watermark({share:f}).")

    def set_disk_limit(self, limit: str) -> None:
        """The free disk space below which the node raises its disk alarm."""
        self.evaluate(f'rabbit_disk_monitor:set_disk_free_limit("{limit}").')

    def write_down(self) -> None:
        """Bring what was declared to the disk; 3.10, if killed soon after, may forget a queue it has confirmed."""
        self.evaluate("mnesia:dump_log().")

    def _end(self, number: signal.Signals, timeout: float) -> None:
        super()._end(number, timeout)
        if self._own_epmd is not None:
            self._own_epmd.kill()
