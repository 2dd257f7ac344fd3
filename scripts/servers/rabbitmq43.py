"""RabbitMQ 4.3 beside the installed broker: Debian's own packages, unpacked into a cache folder and run from there.

It needs no root, no chroot and no mount, only `apt-get` and `dpkg-deb`: the unpacked programs are started through the
C library that was unpacked with them. It is made once; the folder can be deleted at any time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from .rabbitmq import Release
from .server import ServiceError

if TYPE_CHECKING:
    from collections.abc import Iterator

SUITE = "forky"
OLDEST = (4, 3)
RECIPE = "1"
"""Changes whenever what is unpacked, or how, changes: a tree of another recipe is not used."""
MIRROR_VARIABLE = "DLQBATCH_TEST_DEBIAN_MIRROR"
NO_MIRROR = (
    "The packages of this machine come from no Debian mirror (looked for in /etc/apt), so it is not known where those "
    f"of Debian {SUITE} can be fetched. Name the address of a mirror: export {MIRROR_VARIABLE}=http://…/debian"
)
KEYRINGS = ("debian-archive-keyring.gpg", "debian-archive-keyring.pgp")
# The others come along as dependencies of a whole system: users, logins, system services. None is needed to run it.
UNPACKED = re.compile(r"(erlang-|rabbitmq-server_|lib|zlib1g_)")
MISSING = "RabbitMQ 4.3 is not unpacked on this machine. scripts/rabbitmq43 --prepare does it: about 75 MB from Debian."
MIRROR = re.compile(r"https?://.*/debian/?")
"""Debian's own packages, and not its security updates or somebody else's packages."""
ELF = b"\x7fELF"

APT_CONFIG = """\
Dir::Etc::sourcelist "{folder}/sources.list";
Dir::Etc::sourceparts "{folder}/none";
Dir::Etc::preferences "{folder}/none";
Dir::Etc::preferencesparts "{folder}/none";
Dir::State "{folder}/state";
Dir::State::status "{folder}/status";
Dir::Cache "{folder}/cache";
Dir::Cache::archives "{folder}/archives";
Dir::Log "{folder}/log";
APT::Update::Error-Mode "any";
Acquire::Languages "none";
Acquire::Retries "3";
APT::Install-Recommends "false";
{user}
"""
# A program of Erlang looks at the name that it was started by.
LAUNCHER = """\
#!/bin/sh
exec {loader} --argv0 "$0" --library-path {libraries} {program} "$@"
"""
ERL = """\
#!/bin/sh
export ROOTDIR={root} BINDIR={programs} EMU=beam PROGNAME=erl
exec {programs}/erlexec "$@"
"""
ESCRIPT = """\
#!/bin/sh
export ESCRIPT_EMULATOR={bin}/erl
exec {programs}/escript "$@"
"""


def cache_folder() -> Path:
    chosen = os.environ.get("DLQBATCH_TEST_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dlqbatch"


def tree() -> Path:
    """Where it is, or would be: the folder is there only when it is complete."""
    return cache_folder() / f"rabbitmq-{SUITE}-{os.uname().machine}-{RECIPE}"


def unpacked() -> Release:
    """The release in the cache."""
    folder = tree()
    if not folder.is_dir():
        raise ServiceError(MISSING)
    return _release(folder)


def prepare() -> Release:
    """The release in the cache, fetched and unpacked first if it is not there; two at once wait for each other."""
    folder = tree()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.parent / "lock"):
        if not folder.is_dir():
            for tool in ("apt-get", "dpkg-deb"):
                if shutil.which(tool) is None:
                    raise ServiceError(f"RabbitMQ 4.3 is unpacked from Debian's packages; there is no {tool} here.")
            with tempfile.TemporaryDirectory(prefix="unpacking-", dir=folder.parent) as work:
                _unpack(Path(work), folder)
    return _release(folder)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _unpack(work: Path, folder: Path) -> None:
    made = work / "tree"
    for package in _download(work / "apt"):
        _call(["dpkg-deb", "--extract", str(package), str(made)], f"{package.name} could not be unpacked")
    found = _version(made)
    if found < OLDEST:
        raise ServiceError(f"Debian {SUITE} has RabbitMQ {'.'.join(map(str, found))}, which is older than 4.3.")
    _write_launchers(made, folder)
    made.rename(folder)


def _download(folder: Path) -> list[Path]:
    """The packages, checked by apt against Debian's signature; only its own lists and cache are written."""
    for name in ("state/lists/partial", "cache", "archives/partial", "log", "none"):
        (folder / name).mkdir(parents=True)
    (folder / "status").touch()
    (folder / "sources.list").write_text(f"deb [signed-by={_keyring()}] {_mirror()} {SUITE} main\n")
    # As root apt would fetch as another user, who may not enter this folder.
    user = 'APT::Sandbox::User "root";' if os.geteuid() == 0 else ""
    config = folder / "apt.conf"
    config.write_text(APT_CONFIG.format(folder=folder, user=user))
    environment = os.environ | {"APT_CONFIG": str(config), "LC_ALL": "C.UTF-8"}
    _call(["apt-get", "update"], f"the list of Debian {SUITE}'s packages could not be fetched", environment)
    download = ["apt-get", "install", "--download-only", "--yes", "rabbitmq-server"]
    _call(download, f"the packages of Debian {SUITE} could not be fetched", environment)
    return sorted(package for package in (folder / "archives").glob("*.deb") if UNPACKED.match(package.name))


def _keyring() -> Path:
    for name in KEYRINGS:
        path = Path("/usr/share/keyrings") / name
        if path.exists():
            return path
    raise ServiceError(
        "Debian's keys, by which its packages are checked, are not installed. "
        "On Debian or Ubuntu: sudo apt-get install debian-archive-keyring"
    )


def _mirror(apt: Path = Path("/etc/apt")) -> str:
    """The Debian mirror that is asked for, else the one that this machine's own packages come from."""
    chosen = os.environ.get(MIRROR_VARIABLE)
    if chosen:
        return chosen
    for address in (*_configured(apt), *_fetched()):
        if MIRROR.fullmatch(address):
            return address
    raise ServiceError(NO_MIRROR)


def _configured(apt: Path) -> Iterator[str]:
    """The addresses in apt's own files: one line for each source, or paragraphs of fields."""
    for path in (apt / "sources.list", *sorted((apt / "sources.list.d").glob("*.list"))):
        for line in _lines(path):
            # deb [options] address suite components
            found = re.match(r"deb\s+(?:\[[^\]]*\]\s+)?(\S+)", line)
            if found:
                yield found[1]
    for path in sorted((apt / "sources.list.d").glob("*.sources")):
        is_addresses = False
        for line in _lines(path):
            name, colon, value = line.partition(":")
            if not line[:1].isspace() and colon:
                is_addresses = name.strip().lower() == "uris"
                yield from value.split() if is_addresses else ()
            elif is_addresses:  # a field goes on in lines that begin with a blank
                yield from line.split()


def _lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if not line.startswith("#")]


def _fetched() -> list[str]:
    """What apt itself says that it fetches from: it may be configured elsewhere."""
    if shutil.which("apt-get") is None:
        return []
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()


def _write_launchers(made: Path, folder: Path) -> None:
    """Make every program of Erlang one that is loaded by the C library beside it; `folder` is where all is to be."""
    loader = next(made.glob("usr/lib/*/ld-linux*.so.*"), None)
    erlang = next(made.glob("usr/lib/erlang/erts-*/bin"), None)
    if loader is None or erlang is None:
        raise ServiceError(f"Debian {SUITE}'s packages are laid out in another way than expected, in {made}.")

    def final(path: Path) -> str:
        return shlex.quote(str(folder / path.relative_to(made)))

    for path in sorted(made.glob("usr/lib/erlang/**/bin/*")):
        if path.is_file() and not path.is_symlink() and path.read_bytes()[:4] == ELF:
            program = path.rename(path.with_name(path.name + ".elf"))
            text = LAUNCHER.format(loader=final(loader), libraries=final(loader.parent), program=final(program))
            _write_program(path, text)
    programs = made / "bin"
    programs.mkdir()
    places = {"root": final(erlang.parents[1]), "programs": final(erlang), "bin": final(programs)}
    _write_program(programs / "erl", ERL.format(**places))
    _write_program(programs / "escript", ESCRIPT.format(**places))
    (programs / "epmd").symlink_to(os.path.relpath(erlang / "epmd", programs))


def _write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def _release(folder: Path) -> Release:
    return Release(folder / "usr/lib/rabbitmq/bin", folder / "bin")


def _version(folder: Path) -> tuple[int, ...]:
    for home in folder.glob("usr/lib/rabbitmq/lib/rabbitmq_server-*"):
        return tuple(int(number) for number in re.findall(r"\d+", home.name)[:3])
    raise ServiceError(f"there is no RabbitMQ in {folder}")


def _call(command: list[str], failure: str, environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ServiceError(f"{failure}:\n{done.stdout[-2000:]}")
