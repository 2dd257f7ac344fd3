"""A cold start beside a bare script that imports pika, connects, declares the same topology and disconnects.

Usage: scripts/bench cold_start [--rounds N] [--messages N] [--json FILE] [--require EMPTY MESSAGES] [--write PAGE]
Each is a new process, with compiled files in place, SQLite, and a settings file; they take turns. --write puts the
results between the marks of a page.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pika
from contest import keep
from contest import machine as about_machine
from page import machine, put, sentence, table
from workload import connect, fill

sys.path.insert(0, str(Path(__file__).parent.parent))
from dlqbatch.settings import load
from dlqbatch.store import migrate
from dlqbatch.topology.declare import kinds_of
from dlqbatch.topology.kinds import whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dlqbatch.topology.model import Topology

HERE: Final = Path(__file__).parent
HANDLER: Final = HERE.parent / "handler.py"
RETRY_QUEUE: Final = "retry-queue"
BARE: Final = """\
import pika

connection = pika.BlockingConnection(pika.URLParameters({url!r}))
channel = connection.channel()
for name, kind in {exchanges!r}:
    channel.exchange_declare(name, kind, durable=True)
for name, arguments in {queues!r}:
    channel.queue_declare(name, durable=True, arguments=arguments)
for queue, exchange, key in {bindings!r}:
    channel.queue_bind(queue, exchange, key)
connection.close()
"""
_IMPORT: Final = re.compile(r"import time:\s+(\d+) \|\s+\d+ \| +(\S+)")
_LEAST_SHOWN: Final = 1.0
"""Milliseconds; what takes less is summed up."""


class Took(NamedTuple):
    wall: float
    """Milliseconds, as all of these."""
    cpu: float


def bare_script(url: str, topology: Topology) -> str:
    return BARE.format(
        url=url,
        exchanges=[(one.name, one.type) for one in topology.exchanges],
        queues=[(one.name, dict(one.arguments)) for one in topology.queues],
        bindings=[(one.queue, one.exchange, one.key) for one in topology.bindings],
    )


def run(command: Sequence[str], environment: Mapping[str, str]) -> Took:
    with tempfile.TemporaryFile() as said:
        started = time.perf_counter()
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=said)
        _, status, usage = os.wait4(process.pid, 0)
        elapsed = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            raise SystemExit(f"{command} ended with {process.returncode}:\n{said.read().decode()}")
    return Took(elapsed * 1000, (usage.ru_utime + usage.ru_stime) * 1000)


def imported(
    command: Sequence[str], environment: Mapping[str, str], rounds: int, prepare: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Milliseconds that each module took for itself, the least of several runs.

    Python leaves out the few that are imported by a name in a table, such as the job's own; not what these import.
    """
    least: dict[str, float] = {}
    timed = [command[0], "-X", "importtime", *command[1:]]
    for _ in range(rounds):
        prepare()
        said = subprocess.run(timed, env=environment, capture_output=True, text=True, check=True).stderr
        for microseconds, module in _IMPORT.findall(said):
            least[module] = min(least.get(module, float("inf")), int(microseconds) / 1000)
    return least


def by_package(modules: Mapping[str, float]) -> dict[str, tuple[int, float]]:
    """Number of modules and their milliseconds, by package, and by room for our own; the largest first."""
    numbers, sums = Counter[str](), Counter[str]()
    for module, milliseconds in modules.items():
        parts = module.split(".")
        package = ".".join(parts[:2]) if parts[0] == "dlqbatch" else parts[0].lstrip("_")
        numbers[package] += 1
        sums[package] += milliseconds  # type: ignore[assignment]  # a Counter holds any number
    return {package: (numbers[package], round(total, 2)) for package, total in sums.most_common()}


def by_origin(packages: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float]]:
    """Ours in one, Python's own in one, and each other package for itself."""
    found: dict[str, tuple[float, float]] = {}
    for package, (number, milliseconds) in packages.items():
        ours = package.partition(".")[0] == "dlqbatch"
        own = package in sys.stdlib_module_names or f"_{package}" in sys.stdlib_module_names
        origin = "dlqbatch" if ours else "Python's own" if own else package
        before = found.get(origin, (0, 0.0))
        found[origin] = (before[0] + number, before[1] + milliseconds)
    return found


def spread(values: Sequence[float], digits: int = 1) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), digits),
        "least": round(min(values), digits),
        "most": round(max(values), digits),
    }


def measure(options: argparse.Namespace, url: str, folder: Path) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DLQBATCH_", "PYTHON"))}
    environment |= {
        "PYTHONPYCACHEPREFIX": str(folder / "compiled"),  # a checkout may hold none, or old ones
        "DLQBATCH_CONFIG": str(HERE / "benchmark.properties"),
        "DLQBATCH_BROKER_URL": url,
        "DLQBATCH_DATABASE_URL": f"sqlite:///{folder / 'dlqbatch.sqlite3'}",
        "DLQBATCH_TIER_TTLS": "1h,2h,3h",
    }
    settings = load({}, environment)
    migrate.upgrade(settings.database_url.get_secret_value())
    topology = whole(tuple(kinds_of(settings)))
    script = folder / "bare.py"
    script.write_text(bare_script(url, topology))
    bare, ours = [sys.executable, str(script)], [sys.executable, str(HANDLER)]

    connection = connect(url)
    channel = connection.channel()
    run(bare, environment)
    took: dict[str, list[Took]] = {"bare": [], "empty": [], "messages": []}
    for turn in range(options.rounds + 2):
        round_ = {"bare": run(bare, environment), "empty": run(ours, environment)}
        fill(channel, RETRY_QUEUE, options.messages, 1024)
        round_["messages"] = run(ours, environment)
        if channel.queue_declare("queue.delay.1", passive=True).method.message_count != options.messages:
            raise SystemExit("the run did not delay what was in the retry queue")
        channel.queue_purge("queue.delay.1")
        if turn > 1:  # the first turns compile and warm up
            for name, one in round_.items():
                took[name].append(one)
            sys.stderr.write(", ".join(f"{name} {one.wall:.0f} ms" for name, one in round_.items()) + "\n")
    packages = {
        "empty": by_package(imported(ours, environment, options.import_rounds)),
        "messages": by_package(
            imported(ours, environment, options.import_rounds, lambda: fill(channel, RETRY_QUEUE, 1, 1024))
        ),
        "bare": by_package(imported(bare, environment, options.import_rounds)),
    }
    version = connection._impl.server_properties["version"]  # noqa: SLF001  (pika shows it nowhere else)
    connection.close()
    found: dict[str, Any] = {
        "benchmark": "cold_start",
        "rabbitmq": version,
        "python": platform.python_version(),
        "pika": pika.__version__,
        "cores": os.cpu_count(),
        "messages": options.messages,
        "rounds": options.rounds,
    }
    for name, ours_ in took.items():
        found[f"{name}_ms"] = spread([one.wall for one in ours_])
        found[f"{name}_cpu_ms"] = spread([one.cpu for one in ours_])
    for name in ("empty", "messages"):
        pairs = list(zip(took[name], took["bare"], strict=True))
        found[f"{name}_to_bare"] = spread([one.wall / other.wall for one, other in pairs], 2)
        found[f"{name}_to_bare_cpu"] = spread([one.cpu / other.cpu for one, other in pairs], 2)
    return found | {"imports": packages}


def show(found: Mapping[str, Any]) -> None:
    for name, value in found.items():
        if name == "imports":
            continue
        shown = "{median:,} ({least:,} to {most:,})".format_map(value) if isinstance(value, dict) else value
        sys.stdout.write(f"{name:<24}{shown}\n")
    sys.stdout.write("\nmodules and their own milliseconds\n")
    sys.stdout.write(f"{'package':<24}{'empty':>14}{'with messages':>16}{'bare':>14}\n")
    for package, *parts in breakdown(found["imports"]):
        cells = (f"{number:>5}{milliseconds:>9.1f}" if number else "" for number, milliseconds in parts)
        sys.stdout.write(f"{package:<24}" + "{:>14}{:>16}{:>14}".format(*cells) + "\n")


def breakdown(imports: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """By package, its number of modules and their milliseconds: of an empty run, one with messages, and the script."""
    empty, messages, bare = (imports[name] for name in ("empty", "messages", "bare"))
    rows = [
        (package, *(each.get(package, (0, 0.0)) for each in (empty, messages, bare))) for package in messages | empty
    ]
    rest = [row for row in rows if max(part[1] for part in row[1:]) < _LEAST_SHOWN]
    shown_rows = sorted((row for row in rows if row not in rest), key=lambda row: (-row[1][1], -row[2][1]))
    summed = [tuple(map(sum, zip(*column, strict=True))) for column in list(zip(*rest, strict=True))[1:]]
    total = [tuple(map(sum, zip(*each.values(), strict=True))) for each in (empty, messages, bare)]
    return [*shown_rows, ("all others", *summed), ("together", *total)]


def page_of(found: Mapping[str, Any]) -> list[str]:
    about = machine(RabbitMQ=found["rabbitmq"], pika=found["pika"])
    kinds = {
        "bare": "a bare script: `import pika`, connect, declare the same, disconnect",
        "empty": "a drain that finds nothing",
        "messages": f"a drain of {found['messages']} messages, with its policy from SQLite",
    }
    times = [
        (
            *(name, _spread(found[f"{kind}_ms"], "ms"), _spread(found[f"{kind}_cpu_ms"], "ms")),
            *((_spread(found[f"{kind}_to_bare{of}"]) if kind != "bare" else "1") for of in ("", "_cpu")),
        )
        for kind, name in kinds.items()
    ]
    parts = [
        (package, *(f"{milliseconds:.1f} ms of {number}" if number else "" for number, milliseconds in each))
        for package, *each in breakdown({kind: by_origin(packages) for kind, packages in found["imports"].items()})
    ]
    return [
        f"{sentence(about)}. Medians of {found['rounds']} rounds, in brackets the least and the most.",
        "",
        *table(("a new process", "time", "CPU of it", "time to the bare script's", "CPU to its"), times),
        "",
        "What of it is importing, in milliseconds and modules; each package without what it imports itself.",
        "",
        *table(("package", "finds nothing", "with messages", "bare script"), parts),
    ]


def _spread(value: Mapping[str, float], unit: str = "") -> str:
    return f"{value['median']:g} {unit}".strip() + f" ({value['least']:g} to {value['most']:g})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--import-rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=10)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--write",
        type=Path,
        metavar="PAGE",
        help="put the results between the marks of this page",
    )
    parser.add_argument(
        "--require",
        type=float,
        nargs=2,
        metavar=("EMPTY", "MESSAGES"),
        help="exit 1 if a median ratio to the bare script is above (the contract: 2.5 4.5)",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dlqbatch-") as folder:
        found = measure(options, os.environ["DLQBATCH_TEST_BROKER_URL"], Path(folder))
    show(found)
    keep("cold_start", {**found, "about": about_machine()}, options.json)
    if options.write:
        put("cold_start", page_of(found), options.write)
    if not options.require:
        return 0
    ratios = (found["empty_to_bare"]["median"], found["messages_to_bare"]["median"])
    return int(any(ratio > most for ratio, most in zip(ratios, options.require, strict=True)))


if __name__ == "__main__":
    sys.exit(main())
