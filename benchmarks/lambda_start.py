"""Cold and warm starts of each function: the real zip file, AWS's own runtime client, and the share of a CPU it gets.

Usage: scripts/bench lambda_start [--against COMMIT] [--rounds N] [--memory MB] [--json FILE] [--write [PAGE]]
A function is started as Lambda starts it, from a folder that it cannot write to, with its secret in a Secrets Manager
on this machine, in a control group with the CPU that Lambda gives for its memory; so this needs root. Lambda gives more
to the start itself; here it has no more than the run. With --against the package of that commit takes turns with this
one. --write puts the results into docs/aws.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import zipfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import boto3
from contest import keep
from cost import database
from moto.server import ThreadedMotoServer
from page import PAGE, machine, put, sentence, table

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).parent.parent))
from lambda_runtime import Function

from dlqbatch.settings import load
from dlqbatch.store import migrate
from dlqbatch.topology.declare import apply_topology
from scripts import lambda_zip, services

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).parent.parent
JOBS: Final = ("drain", "ingest", "lifecycle", "monitor", "retain")
WHOLE_CPU_MB: Final = 1_769
PERIOD: Final = 20_000
"""Microseconds in which a function gets its share of a CPU."""
CGROUPS: Final = Path("/sys/fs/cgroup")


class Start(NamedTuple):
    ready: float
    """Seconds until the runtime asks for the first event."""
    first: float
    """Seconds of the first event."""
    warm: float
    cpu: float
    """Seconds of a CPU, until the first answer."""

    @property
    def cold(self) -> float:
        return self.ready + self.first


@contextmanager
def share_of_a_cpu(memory: int) -> Iterator[Path]:
    """The file into which a process writes its number to get no more than that."""
    quota = PERIOD * memory // WHOLE_CPU_MB
    old = (CGROUPS / "cpu" / "cgroup.procs").exists()
    group = (CGROUPS / "cpu" if old else CGROUPS) / f"dlqbatch-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        raise SystemExit(f"A control group cannot be made here ({error}); this needs root.") from None
    try:
        if old:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (group / "cpu.max").write_text(f"{quota} {PERIOD}")
        yield group / "cgroup.procs"
    finally:
        group.rmdir()


def unpacked(sources: Path, folder: Path) -> tuple[Path, float]:
    """The package that these sources make, as Lambda has it; and its size in MB."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    architecture = {"aarch64": "arm64"}.get(platform.machine(), platform.machine())
    command = [sys.executable, "scripts/lambda_zip.py", "--folder", str(folder), "--python", python]
    subprocess.run([*command, "--architecture", architecture], cwd=sources, check=True, stdout=sys.stderr)
    (made,) = folder.glob("*.zip")
    with zipfile.ZipFile(made) as archive:
        archive.extractall(folder / "task")
    return folder / "task", made.stat().st_size / lambda_zip.MB


def checked_out(commit: str, folder: Path) -> Path:
    folder.mkdir()
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


def start(task: Path, job: str, settings: dict[str, str], environ: dict[str, str], members: Path) -> Start:
    joining = ("sh", "-c", 'echo $$ > "$0"; exec "$@"', str(members))
    began = time.monotonic()
    with Function(task, settings | {"job": job}, environ, joining) as function:
        answer = function.send({"job": job})
        answered = time.monotonic()
        if answer.how != "response" or answer.report["outcome"] != "ok":
            raise SystemExit(f"{job}: {answer.text}\n{function.logged()[-5:]}")
        fields = Path(f"/proc/{function.pid}/stat").read_text().rpartition(")")[2].split()
        cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        ready = function.asked_at[0]
        again = time.monotonic()
        assert function.send({"job": job}).report["outcome"] == "ok"
        return Start(ready - began, answered - ready, time.monotonic() - again, cpu)


@contextmanager
def secrets_manager(broker: str, store: str) -> Iterator[dict[str, str]]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing", "region_name": "eu-central-1"}
    client: Any = boto3.client("secretsmanager", endpoint_url=address, **keys)
    client.create_secret(Name="dlqbatch", SecretString=json.dumps({"broker_url": broker, "database_url": store}))
    yield {"AWS_ENDPOINT_URL": address}
    server.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT", help="the package of this commit takes turns with this one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", type=int, default=512)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", nargs="?", type=Path, const=PAGE, metavar="PAGE")
    options = parser.parse_args()
    broker = os.environ["DLQBATCH_TEST_BROKER_URL"]
    with database() as store, services.work_folder() as folder, share_of_a_cpu(options.memory) as members:
        migrate.upgrade(store)
        apply_topology(load({}, {"DLQBATCH_BROKER_URL": broker, "DLQBATCH_CONFIG": os.devnull}))
        packages = {"now": unpacked(ROOT, folder / "now")}
        if options.against:
            sources = checked_out(options.against, folder / "sources")
            packages = {options.against: unpacked(sources, folder / "before"), **packages}
        settings = {"secret": "dlqbatch", "metrics_namespace": "dlqbatch", "log_format": "json"}
        settings |= {"allow_empty_policy": "true", "max_seconds": "45"}
        found: dict[tuple[str, str], list[Start]] = {}
        with secrets_manager(broker, store) as environ:
            for turn in range(options.rounds):
                for job in JOBS:
                    for name, (task, _) in packages.items():
                        one = start(task, job, settings, environ, members)
                        found.setdefault((job, name), []).append(one)
                sys.stderr.write(f"round {turn + 1} of {options.rounds}\n")
    lines = shown(found, {name: size for name, (_, size) in packages.items()}, options)
    sys.stdout.write("\n".join(lines) + "\n")
    if options.json:
        keep(options.json, {f"{job} {name}": [one._asdict() for one in all_] for (job, name), all_ in found.items()})
    if options.write:
        put("lambda_start", lines, options.write)
    return 0


def shown(found: dict[tuple[str, str], list[Start]], sizes: dict[str, float], options: argparse.Namespace) -> list[str]:
    def median(job: str, name: str, of: str) -> float:
        return statistics.median(getattr(one, of) for one in found[job, name])

    share = options.memory / WHOLE_CPU_MB
    rows = [
        (
            job,
            name,
            f"{median(job, name, 'cpu'):.2f} s",
            f"**{median(job, name, 'cpu') / share:.1f} s**",
            f"{median(job, name, 'cold'):.1f} s",
            f"{median(job, name, 'first'):.2f} s",
            f"{median(job, name, 'warm'):.2f} s",
        )
        for job, name in found
    ]
    said = ", ".join(f"{name} {size:.1f} MB" for name, size in sizes.items())
    about = f"Medians of {options.rounds} starts with {share:.2f} of a CPU, as {options.memory} MB have it."
    head = ("function", "package", "CPU, cold", "**at that share**", "waited for, cold", "of it the run", "warm run")
    return [f"{sentence(machine())}. {about} Size of the zip file: {said}.", "", *table(head, rows)]


if __name__ == "__main__":
    sys.exit(main())
