"""Runs the whole example once: an API, two workers, payments, and dlqbatch for what failed; then counts everything.

Exit code 0 if every payment is either settled or dead, none both and none twice; 1 if not; 4 if there is no broker.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pika
from bank import BUSY_ONCE, BUSY_TWICE, CLOSED, DECLINED, GOOD, Bank
from ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

HERE = Path(__file__).resolve().parent
UNREACHABLE = 4  # as dlqbatch itself ends without a broker
ASKS_TWICE = 0.05  # so many clients lose patience and send their payment again
DIES_AT = 5  # the transfer in whose middle the settlement worker is killed
MOST_RESTARTS = 3
STOPS_WITHIN = 20.0
LATEST_AFTER = 300
PAGE = 10_000

SETTINGS = """
dlqbatch.ladder=false
dlqbatch.queue-type={queue_type}
dlqbatch.topology.transactions.kind=pipeline
dlqbatch.topology.transactions.exchange={prefix}transaction.created
dlqbatch.topology.settlements.kind=pipeline
dlqbatch.topology.settlements.exchange={prefix}settlement.requested
dlqbatch.connect-timeout-seconds=5
# The lifecycle looks at a dead message after so long; a minute is the default.
dlqbatch.retry-delays=1s
"""


class Failed(Exception):
    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code


class Store:
    """dlqbatch, used as a person or cron uses it."""

    def __init__(self, broker_url: str, database_url: str, properties: Path) -> None:
        # Settings that happen to be in the environment, a webhook for example, are not meant for this.
        clean = {name: value for name, value in os.environ.items() if not name.startswith("DLQBATCH_")}
        self._environment = clean | {
            "DLQBATCH_BROKER_URL": broker_url,
            "DLQBATCH_DATABASE_URL": database_url,
            "DLQBATCH_CONFIG": str(properties),
            "DLQBATCH_LOG_LEVEL": "warning",
        }

    def command(self, *arguments: str, good: tuple[int, ...] = (0,)) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "dlqbatch", *arguments],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if done.returncode not in good:
            code = UNREACHABLE if done.returncode == UNREACHABLE else 1
            raise Failed(f"dlqbatch {' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()}", code)
        return done.stdout

    def ask(self, *arguments: str, good: tuple[int, ...] = (0,)) -> Any:
        return json.loads(self.command(*arguments, "--json", good=good))

    def dead(self, queues: tuple[str, ...], since: str) -> list[dict[str, Any]]:
        """All that failed in these queues; others may use the same store."""
        found: list[dict[str, Any]] = []
        after: list[str] = []
        while True:
            # 1 means that there are none.
            page = self.ask("messages", "list", "--since", since, "--limit", str(PAGE), *after, good=(0, 1))
            found += (one for one in page["messages"] if one["origin_queue"] in queues)
            if page["next"] is None:
                return found
            after = ["--after", str(page["next"])]

    def groups(self, queues: tuple[str, ...], since: str) -> Iterator[dict[str, Any]]:
        """Equal failures together, the largest group first."""
        for group in self.ask("messages", "groups", "--since", since, good=(0, 1))["groups"]:
            sample = group["sample"]
            if sample["origin_queue"] in queues:
                told = {name: sample[name] for name in ("error_type", "error_message")}
                yield {"fingerprint": group["fingerprint"], "messages": sum(group["counts"].values()), **told}


class Processes:
    """The API and the workers; one that dies is started again, as systemd or Kubernetes would."""

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        self._environment, self._folder = environment, folder
        self._running: dict[str, subprocess.Popen[str]] = {}
        self.restarts = 0

    def start(self, script: str, *arguments: str) -> subprocess.Popen[str]:
        with (self._folder / f"{script}.log").open("a") as log:
            process = subprocess.Popen(
                [sys.executable, str(HERE / f"{script}.py"), *arguments],
                env=self._environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._running[script] = process
        return process

    def start_all(self) -> str:
        """Where the API listens."""
        api = self.start("api")
        self.start("transaction_worker")
        self.start("settlement_worker", "--die-at", str(DIES_AT))
        assert api.stdout is not None
        address = api.stdout.readline().strip()
        if not address:
            raise Failed(f"the API did not start:\n{self._end_of_log('api')}")
        return address

    def _end_of_log(self, script: str) -> str:
        return (self._folder / f"{script}.log").read_text()[-2000:]

    def tend(self) -> None:
        for script, process in list(self._running.items()):
            code = process.poll()
            if code is None:
                continue
            if script == "api" or self.restarts == MOST_RESTARTS:
                raise Failed(f"{script} ended with {code}:\n{self._end_of_log(script)}")
            self.restarts += 1
            if process.stdout is not None:
                process.stdout.close()
            say(f"the {script.replace('_', ' ')} died ({code}) and is started again")
            self.start(script)

    def stop(self) -> None:
        """Let each finish what it is doing; kill what does not end."""
        for process in self._running.values():
            process.terminate()
        deadline = time.monotonic() + STOPS_WITHIN
        for process in self._running.values():
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._running.clear()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def payments(number: int, failure_rate: float, seed: int) -> Iterator[dict[str, Any]]:
    """The same ones for the same seed. Half of what fails succeeds later; a few fail at the first worker already."""
    chance = random.Random(seed)
    for count in range(1, number + 1):
        account, currency = GOOD, "EUR"
        if chance.random() < failure_rate:
            account = chance.choice((BUSY_ONCE, BUSY_TWICE, DECLINED, CLOSED))
            if account == CLOSED and chance.random() < 1 / 4:
                currency = "XXX"
        cents = chance.randrange(100, 100_000)
        yield {"payment_id": f"payment-{count:06}", "account": account, "currency": currency, "cents": cents}


def post(api: str, payment: dict[str, Any]) -> None:
    request = urllib.request.Request(f"{api}/payments", json.dumps(payment).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=10) as answer:
        answer.read()


def waiting(broker_url: str, queues: Iterable[str]) -> dict[str, int]:
    """How many messages each queue holds that nobody has taken."""
    with pika.BlockingConnection(pika.URLParameters(broker_url)) as connection:
        channel = connection.channel()
        return {queue: channel.queue_declare(queue, passive=True).method.message_count for queue in queues}


def ask_for_all(api: str, options: argparse.Namespace, tend: Callable[[], None]) -> int:
    """How many requests that were."""
    impatient = random.Random(options.seed + 1)
    requests = 0
    for payment in payments(options.payments, options.failure_rate, options.seed):
        for _ in range(2 if impatient.random() < ASKS_TWICE else 1):
            post(api, payment)
            requests += 1
        tend()
    return requests


def perform(options: argparse.Namespace, folder: Path, at_the_end: ExitStack) -> dict[str, Any]:
    deadline = time.monotonic() + options.timeout
    prefix = f"payments-{secrets.token_hex(3)}."  # two of these at once do not meet, nor a user's own queues
    queues = (f"{prefix}transaction.created", f"{prefix}settlement.requested")
    dead_letters = tuple(f"dlq.{queue}" for queue in queues)
    since = datetime.now(UTC).isoformat()
    properties = folder / "application.properties"
    properties.write_text(SETTINGS.format(prefix=prefix, queue_type="quorum" if options.quorum else "classic"))
    database_url = options.database or f"sqlite:///{folder / 'dlqbatch.sqlite3'}"
    store = Store(options.broker, database_url, properties)
    ledger = Ledger(folder)

    store.command("db", "upgrade")
    store.command("topology", "apply")
    if not options.keep:
        delete = ("topology", "delete", "transactions", "settlements", "--with-messages", "--yes")
        at_the_end.callback(store.command, *delete)

    place = {"PAYMENTS_BROKER_URL": options.broker, "PAYMENTS_FOLDER": str(folder), "PAYMENTS_PREFIX": prefix}
    processes = Processes(os.environ | place, folder)
    at_the_end.callback(processes.stop)
    address = processes.start_all()
    say(f"{options.payments} payments go to {address}, failure rate {options.failure_rate}")
    requests = ask_for_all(address, options, processes.tend)

    say("the dead letters are taken into the dead store until every payment is somewhere")
    dead: list[dict[str, Any]] = []
    while time.monotonic() < deadline:
        processes.tend()
        # What a worker holds just now is not counted as waiting, so that it has to be asked where each payment is.
        if not any(waiting(options.broker, queues).values()):
            store.command("ingest", good=(0, 3))  # cron would do this every minute
            dead = store.dead(queues, since)
            if len(ledger.settled() | {one["message_id"] for one in dead}) >= options.payments:
                break
        time.sleep(0.2)
    processes.stop()
    if any(waiting(options.broker, dead_letters).values()):
        # A second copy of a dead message came last.
        store.command("ingest", good=(0, 3))
        dead = store.dead(queues, since)
    settled = ledger.settled()

    # The lifecycle classifies each: none of these failures passes by itself, so each one waits for a person.
    say("the lifecycle classifies them, and the monitor looks")
    while any(one["status"] in {"pending", "processing"} for one in dead) and time.monotonic() < deadline:
        time.sleep(1)  # until they are due: see SETTINGS
        store.command("lifecycle", good=(0, 3))
        dead = store.dead(queues, since)
    monitor = store.ask("monitor")

    dead_ids = {one["message_id"] for one in dead}
    left = waiting(options.broker, queues + dead_letters)
    adds_up = len(settled) + len(dead_ids) == options.payments and not settled & dead_ids and not any(left.values())
    return {
        "adds_up": adds_up,
        "requested": options.payments,
        "requests": requests,
        "settled": len(settled),
        "dead": len(dead_ids),
        "dead_by_error": dict(Counter(one["error_type"] for one in dead).most_common()),
        "dead_messages": len(dead),
        "transfers_asked_again": Bank(folder).asked_again(),
        "workers_restarted": processes.restarts,
        "groups": list(store.groups(queues, since)),
        "monitor": {name: monitor[name] for name in ("metrics", "alerts")},
        "left_in_queues": left,
        "status": store.command("status"),
    }


def show(result: dict[str, Any]) -> None:
    print(f"requested  {result['requested']:6}   in {result['requests']} requests; an impatient client asks twice")
    again = f"asked for again and not made again: {result['transfers_asked_again']}"
    print(f"settled    {result['settled']:6}   {again}; workers that died on the way: {result['workers_restarted']}")
    errors = ", ".join(f"{number} {error}" for error, number in result["dead_by_error"].items())
    print(f"dead       {result['dead']:6}   {errors or 'none'}")
    print("\nWhat a person has to look at (dlqbatch messages groups):")
    for group in result["groups"]:
        print(f"  {group['fingerprint']}  {group['messages']:5}  {group['error_type']}: {group['error_message']}")
    print("\nWhat the monitor saw (dlqbatch status):\n")
    print(result["status"])
    are = "equal" if result["adds_up"] else "NOT equal"
    print(f"settled + dead = {result['settled']} + {result['dead']}, requested {result['requested']}: {are}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--payments", type=int, default=200, metavar="N")
    parser.add_argument("--failure-rate", type=float, default=0.3, metavar="F", help="from 0 to 1 (%(default)s)")
    parser.add_argument("--quorum", action="store_true", help="quorum queues instead of classic ones")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="the same payments again for the same one")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS", help="give up then (%(default)s)")
    parser.add_argument("--database", metavar="URL", help="a dead store for trying out; else a SQLite file")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave ledger and dead store there, and the queues")
    parser.add_argument("--json", action="store_true", help="print the numbers for a program")
    options = parser.parse_args()
    if options.payments < 1 or not 0 <= options.failure_rate <= 1 or options.timeout <= 0:
        parser.error("--payments is at least 1, --failure-rate from 0 to 1, --timeout above 0")
    if options.keep is not None and options.keep.exists() and any(options.keep.iterdir()):
        parser.error(f"{options.keep} is not empty; --keep makes a new folder")
    # There may be several with commas between them; a worker could be given them all, one is enough here.
    options.broker = os.environ.get("DLQBATCH_BROKER_URL", "amqp://guest:guest@127.0.0.1:5672/%2F").partition(",")[0]
    return options


def give_up(number: int, _: object) -> None:
    if number == signal.SIGALRM:
        raise Failed("it took too long")
    raise SystemExit(128 + number)


def main() -> int:
    options = arguments()
    # A signal ends us through the end of the `with` below, so that nothing goes on running.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, give_up)
    # What waits for something looks at the time itself; this is for the case that something else hangs.
    signal.alarm(int(options.timeout) + LATEST_AFTER)
    try:
        with ExitStack() as at_the_end:
            if options.keep is None:
                folder = Path(at_the_end.enter_context(tempfile.TemporaryDirectory(prefix="payments-")))
            else:
                folder = options.keep.resolve()
                folder.mkdir(parents=True, exist_ok=True)
            result = perform(options, folder, at_the_end)
    except Failed as error:
        say(f"payments: {error}")
        return error.code
    if options.json:
        print(json.dumps(result))
    else:
        show(result)
    return 0 if result["adds_up"] else 1


if __name__ == "__main__":
    sys.exit(main())
