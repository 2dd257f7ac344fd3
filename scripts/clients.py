#!/usr/bin/env python3
"""The clients that tests/interop runs: fetched from PyPI, npm and Debian 12 once, each part into a cache folder.

`scripts/clients.py` fetches the parts that are missing, and prints where they are. Each can be deleted at any time.
Their contents stand in tests/interop (requirements*.txt, package-lock.json), and here for Debian; other contents are
another folder. A part that cannot be had does not keep the others away: its tests fail, and say how to get it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if __name__ == "__main__":  # it is run as a file, from any folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from scripts.servers.rabbitmq43 import cache_folder
from scripts.servers.server import ServiceError

if TYPE_CHECKING:
    from collections.abc import Callable

WANTED = Path(__file__).resolve().parent.parent / "tests" / "interop"
REQUIREMENTS, REMOULADES = WANTED / "requirements.txt", WANTED / "requirements-remoulade.txt"
MOLECULERS, OIDC_PROVIDER = WANTED / "moleculer", WANTED / "oidc"
"""moleculer's channels want an older amqplib than the others are tested with."""
PACKAGE_FILES = ("package.json", "package-lock.json")

JAVA = ("librabbitmq-client-java", "libslf4j-java")

GO = "golang-1.19-go"
"""The last Go with its standard library compiled: neither its source (120 MB) nor the command `go` is needed."""
AMQP091 = "golang-github-rabbitmq-amqp091-go-dev"
GO_PARTS = ("pkg/linux_amd64", "pkg/tool/linux_amd64/compile", "pkg/tool/linux_amd64/link")
GO_LEFT_OUT = "pkg/linux_amd64/cmd"
"""What is unpacked of it, and what not of that: 120 MB of 330."""

PHP = ("php8.2-cli", "php8.2-common", "php8.2-amqp", "php-psr-container", "php-psr-event-dispatcher", "php-psr-log")
LIBRARIES = ("libargon2-1", "libicu72", "libpcre2-8-0", "librabbitmq4", "libsodium23", "libxml2")
"""What PHP and its client are linked with."""
SYMFONY = tuple(
    f"php-symfony-{name}"
    for name in (
        "amqp-messenger",
        "deprecation-contracts",
        "event-dispatcher",
        "event-dispatcher-contracts",
        "messenger",
        "service-contracts",
    )
)


def python() -> str:
    """The interpreter that has the frameworks from PyPI."""
    return str(PYTHON.fetched() / "bin" / "python")


def python_of_remoulade() -> str:
    return str(REMOULADE.fetched() / "bin" / "python")


def node_modules() -> str:
    """For the variable NODE_PATH: the libraries from npm."""
    return str(NODE.fetched() / "node_modules")


def moleculers_node_modules() -> str:
    return str(MOLECULER.fetched() / "node_modules")


def oidc_modules() -> Path:
    """The folder with the node_modules of a certified OpenID Connect provider."""
    return OIDC.fetched()


def class_path() -> str:
    """For javac and java: the broker's client for Java, and what it needs."""
    jars = JAVA_CLIENT.fetched() / "usr" / "share" / "java"
    return f"{jars}/amqp-client.jar:{jars}/slf4j-api.jar:{jars}/slf4j-nop.jar"


def compile_go(source: Path) -> str:
    """The program that a source with the package `main` became, beside it."""
    compiled, program = source.with_suffix(".o"), source.with_suffix("")
    folder = GO_CLIENT.fetched()
    packages = (str(_go(folder) / "pkg" / "linux_amd64"), str(folder))
    includes = [word for each in packages for word in ("-I", each)]
    _call(_go_tool(folder, "compile"), "-p", "main", *includes, "-o", str(compiled), str(source))
    searches = [word for each in packages for word in ("-L", each)]
    _call(_go_tool(folder, "link"), *searches, "-o", str(program), str(compiled))
    return str(program)


def php() -> tuple[list[str], dict[str, str]]:
    """The command that runs a file with the classes of Symfony, and the variables that it needs."""
    folder = PHP_CLIENT.fetched()
    (extensions,) = (each.parent for each in (folder / "usr" / "lib" / "php").glob("*/amqp.so"))
    options = {"extension_dir": extensions, "extension": "amqp", "include_path": folder / "usr" / "share" / "php"}
    command = [str(folder / "usr" / "bin" / "php8.2"), "-n"]
    for name, value in options.items():
        command += ["-d", f"{name}={value}"]
    (libraries,) = (folder / "usr" / "lib").glob("*-linux-gnu")
    return command, {"LD_LIBRARY_PATH": str(libraries)}


def _make_python(folder: Path, requirements: Path = REQUIREMENTS) -> None:
    # Programs in an environment hold its path, but only its python is started, which finds its own place.
    venv.create(folder, with_pip=True, symlinks=True)
    pip = (str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-deps")
    _call(*pip, "--disable-pip-version-check", "-r", str(requirements))


def _make_node(folder: Path, wanted: Path = WANTED) -> None:
    _require("npm", "nodejs npm")
    for name in PACKAGE_FILES:
        shutil.copy(wanted / name, folder)
    _call("npm", "ci", "--prefix", str(folder), "--silent", "--ignore-scripts", "--no-audit", "--no-fund")


def _make_java(folder: Path) -> None:
    _require("javac", "default-jdk-headless")
    _unpack(folder, *JAVA)


def _make_go(folder: Path) -> None:
    _unpack(folder, AMQP091)
    package = _download(folder, GO)
    archive = folder / "archive"
    _call("sh", "-c", 'dpkg-deb --fsys-tarfile "$1" > "$2"', "sh", str(package), str(archive))
    parts = [f"./usr/lib/go-1.19/{part}" for part in GO_PARTS]
    left_out = f"--exclude=./usr/lib/go-1.19/{GO_LEFT_OUT}"
    _call("tar", "--extract", "--file", str(archive), "--directory", str(folder), left_out, *parts)
    archive.unlink()
    package.unlink()
    name = "github.com/rabbitmq/amqp091-go"
    sources = (folder / "usr" / "share" / "gocode" / "src" / name).glob("*.go")
    target = folder / f"{name}.a"
    target.parent.mkdir(parents=True)
    options = ("-p", name, "-pack", "-I", str(_go(folder) / "pkg" / "linux_amd64"), "-o", str(target))
    wanted = sorted(str(source) for source in sources if not source.name.endswith("_test.go"))
    _call(_go_tool(folder, "compile"), *options, *wanted)


def _make_php(folder: Path) -> None:
    _unpack(folder, *PHP, *LIBRARIES, *SYMFONY)


def _go(folder: Path) -> Path:
    return folder / "usr" / "lib" / "go-1.19"


def _go_tool(folder: Path, name: str) -> str:
    return str(_go(folder) / "pkg" / "tool" / "linux_amd64" / name)


class Part(NamedTuple):
    """One folder of the cache: it is there only when it is complete."""

    name: str
    clients: str
    content: bytes
    make: Callable[[Path], None]

    def folder(self) -> Path:
        return cache_folder() / f"clients-{self.name}-{hashlib.sha256(self.content).hexdigest()[:12]}"

    def fetched(self) -> Path:
        if not self.folder().is_dir():
            raise ServiceError(
                f"{self.clients}: not on this machine. scripts/clients.py fetches it, and says what it needs."
            )
        return self.folder()

    def prepare(self) -> None:
        """Two at once wait for each other."""
        made = self.folder()
        made.parent.mkdir(parents=True, exist_ok=True)
        with (made.parent / "clients.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if made.is_dir():
                return
            work = Path(tempfile.mkdtemp(prefix="clients-", dir=made.parent))
            try:
                self.make(work)
                work.rename(made)
            finally:
                shutil.rmtree(work, ignore_errors=True)


def _lock_of(wanted: Path) -> bytes:
    return (wanted / "package-lock.json").read_bytes()


def _content(*packages: str) -> bytes:
    return " ".join(packages).encode()


PYTHON = Part(
    "python",
    "Celery and the other frameworks for Python",
    REQUIREMENTS.read_bytes() + repr(sys.version_info[:2]).encode(),
    _make_python,
)
REMOULADE = Part(
    "remoulade",
    "remoulade",
    REMOULADES.read_bytes() + repr(sys.version_info[:2]).encode(),
    partial(_make_python, requirements=REMOULADES),
)
NODE = Part("node", "amqplib and the other libraries for Node", _lock_of(WANTED), _make_node)
MOLECULER = Part("moleculer", "moleculer", _lock_of(MOLECULERS), partial(_make_node, wanted=MOLECULERS))
OIDC = Part("oidc", "oidc-provider for Node", _lock_of(OIDC_PROVIDER), partial(_make_node, wanted=OIDC_PROVIDER))
JAVA_CLIENT = Part("java", "RabbitMQ's client for Java", _content(*JAVA), _make_java)
GO_CLIENT = Part("go", "Go and its client amqp091", _content(GO, AMQP091, *GO_PARTS, GO_LEFT_OUT), _make_go)
PHP_CLIENT = Part("php", "PHP with Symfony Messenger", _content(*PHP, *LIBRARIES, *SYMFONY), _make_php)
PARTS = (PYTHON, REMOULADE, NODE, MOLECULER, OIDC, JAVA_CLIENT, GO_CLIENT, PHP_CLIENT)


def _require(tool: str, packages: str) -> None:
    if shutil.which(tool) is None:
        raise ServiceError(f"{tool} is needed. On Debian or Ubuntu: sudo apt-get install {packages}")


def _unpack(folder: Path, *packages: str) -> None:
    for package in packages:
        fetched = _download(folder, package)
        _call("dpkg-deb", "--extract", str(fetched), str(folder))
        fetched.unlink()


def _download(folder: Path, package: str) -> Path:
    _call("apt-get", "download", package, folder=folder)
    (fetched,) = folder.glob("*.deb")
    return fetched


def _call(*command: str, folder: Path | None = None) -> None:
    done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ServiceError(f"{' '.join(command[:3])} failed:\n{(done.stdout + done.stderr)[-2000:]}")


def main() -> int:
    code = os.EX_OK
    for part in PARTS:
        try:
            part.prepare()
        except (ServiceError, OSError) as error:
            print(f"clients: {part.clients}: {error}", file=sys.stderr)
            code = 4
        else:
            with contextlib.suppress(BrokenPipeError):
                print(part.folder(), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
