"""A private PostgreSQL cluster on loopback."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
from pathlib import Path

from .server import LOOPBACK, Server, ServiceError, free_port

MISSING = (
    "no PostgreSQL server is installed. On Debian or Ubuntu: sudo apt-get install postgresql "
    "(its own cluster is not needed: sudo systemctl disable --now postgresql)."
)
LONGEST_SOCKET_PATH = 107  # the kernel's limit for a Unix socket


def installed_bin() -> Path:
    """The folder of the newest installed server's programs."""
    versions = Path("/usr/lib/postgresql").glob("*/bin")
    folders = sorted(versions, key=lambda one: float(one.parent.name), reverse=True)
    on_path = shutil.which("postgres")
    if on_path:
        folders.append(Path(on_path).resolve().parent)
    for folder in folders:
        if all(os.access(folder / program, os.X_OK) for program in ("initdb", "postgres")):
            return folder
    raise ServiceError(MISSING)


def server_account() -> pwd.struct_passwd | None:
    """Who runs the server: PostgreSQL refuses root; None is whoever we are."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise ServiceError("PostgreSQL does not run as root, and there is neither a user postgres nor a user nobody.")


class PostgresCluster(Server):
    """One cluster, open to everybody on this machine's loopback as the role postgres.

    As root its files belong to another user, who must be able to walk to `folder`: take one under /tmp.
    """

    title = "PostgreSQL"
    stop_signal = signal.SIGINT  # "fast": closes the sessions instead of waiting for them
    abandon_signal = signal.SIGQUIT  # "immediate": SIGKILL would leave its shared memory behind

    def __init__(
        self, folder: Path, *, programs: Path | None = None, port: int | None = None, fsync: bool = True
    ) -> None:
        super().__init__(folder)
        self.programs = programs or installed_bin()
        self.port = port or free_port()
        self.fsync = fsync
        self.data = folder / "data"
        self.log = folder / "postgres.log"

    @property
    def url(self) -> str:
        """The maintenance database, as SQLAlchemy with psycopg 3 spells it."""
        return f"postgresql+psycopg://postgres@{LOOPBACK}:{self.port}/postgres"

    @property
    def socket_folder(self) -> Path:
        return self.folder

    def launch(self) -> None:
        account = server_account()
        self.folder.mkdir(parents=True, exist_ok=True)
        if account:
            os.chown(self.folder, account.pw_uid, account.pw_gid)
        if len(str(self.socket_folder / ".s.PGSQL.00000")) > LONGEST_SOCKET_PATH:
            raise ServiceError(f"{self.folder} is too long a path for PostgreSQL's socket; take one under /tmp.")
        env = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8", "HOME": str(self.folder)}
        if not (self.data / "PG_VERSION").exists():
            self._make_cluster(env, account)
        options = {
            "listen_addresses": LOOPBACK,
            "port": str(self.port),
            "unix_socket_directories": str(self.socket_folder),
            "fsync": "on" if self.fsync else "off",
            "max_connections": "100",
        }
        settings = [word for name, value in options.items() for word in ("-c", f"{name}={value}")]
        self.spawn([str(self.programs / "postgres"), "-D", str(self.data), *settings], env, account)

    def ready(self) -> bool:
        # The server writes its state there itself; `pg_ctl -w` reads the same lines.
        try:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
        except (FileNotFoundError, PermissionError):
            return False
        return len(lines) >= 8 and int(lines[0]) == self.pid and lines[7].strip() == "ready"  # noqa: PLR2004

    def _make_cluster(self, env: dict[str, str], account: pwd.struct_passwd | None) -> None:
        command = [str(self.programs / "initdb"), "-D", str(self.data), "-U", "postgres", "--auth=trust"]
        # Without a sync of the empty cluster: it saves most of the time, and what is written later is synced.
        command += ["--encoding=UTF8", "--no-locale", "--no-sync"]
        made = subprocess.run(
            command,
            env=env,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            user=account.pw_uid if account else None,
            group=account.pw_gid if account else None,
            extra_groups=[] if account else None,
        )
        if made.returncode:
            raise ServiceError(f"initdb could not make a cluster in {self.data}:\n{made.stdout}")
