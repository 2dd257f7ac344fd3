"""Failures as four kinds of consumers write them down, made from a seed, with the truth about which are the same.

What differs within a group is what differs in life: ids, amounts, hosts, times, line numbers, the folder of a release,
who called the failing method, numbers that compilers give to lambdas and proxies, and whether a wrapper lies around it.
Each .NET group is written by MassTransit and by NServiceBus in turn.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import messages
from failure_groups import DOTNET, JAVA, PYTHON, TOLD, Group

from dlqbatch.ingest.dialects import Failure, failure, read_dramatiq

if TYPE_CHECKING:
    from collections.abc import Callable

SPRING, MASSTRANSIT, NSERVICEBUS, DRAMATIQ = "spring", "masstransit", "nservicebus", "dramatiq"


@dataclass(frozen=True)
class Failed:
    """A dead message, as far as it tells why it died."""

    truth: str
    """The name of its group."""
    dialect: str
    origin: str
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b"{}"

    @property
    def failure(self) -> Failure:
        entries = [(name.encode(), messages.text(value)) for name, value in self.headers.items()]
        return failure(messages.encode_table(entries), (), read_dramatiq(self.body))


def values(chance: random.Random) -> dict[str, str]:
    def digits(least: int, most: int) -> str:
        return str(chance.randint(10 ** (least - 1), 10**most - 1))

    word = "".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randint(3, 9)))
    return {
        "n": digits(1, 6),
        "id": f"order-{digits(3, 8)}",
        "uuid": str(_uuid(chance)),
        "hex": f"{chance.getrandbits(64):016x}",
        "ip": ".".join(str(chance.randint(1, 254)) for _ in range(4)),
        "port": digits(3, 4),
        "host": f"{chance.choice(['db', 'cache', 'pay'])}-{chance.randint(1, 40)}.eu-{chance.randint(1, 3)}.internal",
        "mail": f"{word}.{digits(1, 2)}@{chance.choice(['example.com', 'mail.example.org'])}",
        "url": f"https://api-{chance.randint(1, 9)}.example.com/v1/orders/{digits(3, 8)}?try={chance.randint(1, 9)}",
        "date": f"{chance.randint(2019, 2026)}-{chance.randint(1, 12):02}-{chance.randint(1, 28):02}",
        "time": f"{chance.randint(2019, 2026)}-{chance.randint(1, 12):02}-{chance.randint(1, 28):02}T"
        f"{chance.randint(0, 23):02}:{chance.randint(0, 59):02}:{chance.randint(0, 59):02}.{digits(3, 3)}Z",
        "path": f"/data/{word}/{chance.randint(2019, 2026)}/{digits(2, 5)}.csv",
        "json": json.dumps(
            {word: chance.randint(1, 999), "lines": [{"sku": digits(4, 6)} for _ in range(chance.randint(0, 3))]}
        ),
        "word": word,
        "name": chance.choice(["", "", "", "", "van "]) + word.capitalize(),
        "ms": f"{digits(2, 5)}ms",
        "amount": f"{chance.randint(1, 9999)}.{chance.randint(0, 99):02}",
    }


def _uuid(chance: random.Random) -> str:
    text = f"{chance.getrandbits(128):032x}"
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


# --- Java


def spring(group: Group, chance: random.Random) -> tuple[dict[str, str], bytes]:
    text = group.text.format(**values(chance))
    if not group.place:
        return {"x-exception-message": text}, b"{}"

    def line(name: str) -> str:
        owner = name.rpartition(".")[0].rpartition(".")[2].partition("$")[0]
        return f"\tat {name}({owner}.java:{chance.randint(1, 900)})"

    place = group.place + (str(chance.randint(0, 40)) if group.place.endswith("$") else "")
    proxy = f"shop.Listener$$SpringCGLIB$${chance.randint(0, 9)}.handle(<generated>)"
    callers = [line(f"shop.Listener.{chance.choice(['handle', 'retry', 'again'])}"), f"\tat {proxy}"]
    outer = [
        line("org.springframework.amqp.rabbit.listener.AbstractMessageListenerContainer.invokeListener"),
        line("java.base/java.lang.Thread.run"),
    ]
    frames = [line(name) for name in group.through] + [line(place)] + callers[: chance.randint(0, 2)] + outer
    head = f"{group.type}: {text}"
    trace = [head, *frames]
    kind = chance.randrange(4)
    if kind == 1:
        wrapper = (
            "org.springframework.amqp.rabbit.support.ListenerExecutionFailedException: Listener method threw exception"
        )
        trace = [wrapper, *outer, f"Caused by: {head}", *frames[:-1], "\t... 1 more"]
    elif kind == 2:
        wrapper = f"java.util.concurrent.CompletionException: {head}"
        trace = [
            wrapper,
            line("java.base/java.util.concurrent.CompletableFuture.encodeThrowable"),
            f"Caused by: {head}",
            *frames,
        ]
    elif kind == 3:
        trace = [
            head,
            *frames,
            "\tSuppressed: java.io.IOException: closing",
            line("shop.pay.Pool.close"),
            f"Caused by: shop.Deep: {text}",
            line("shop.deep.Deep.down"),
        ]
    return {"x-exception-message": text, "x-exception-stacktrace": "\n".join(trace) + "\n"}, b"{}"


# --- .NET


def _dotnet(group: Group, chance: random.Random) -> tuple[str, str, list[str]]:
    root = chance.choice([r"C:\build", "/src", "/home/build/work/1"])

    def line(name: str) -> str:
        name = "".join(str(chance.randint(0, 30)) if sign == "#" else sign for sign in name)
        where = (
            ""
            if name.startswith(("System", "Microsoft", "MassTransit", "Dapper", "NServiceBus"))
            else f" in {root}/Shop.cs:line {chance.randint(1, 900)}"
        )
        return f"   at {name}{where}"

    callers = [line(f"Shop.Consumers.{chance.choice(['Main', 'Second'])}Consumer.Consume(ConsumeContext`1 context)")]
    callers = callers if group.place and chance.random() < 0.7 else []
    own = [line(group.place)] if group.place else []
    frames = [
        *(line(name) for name in group.through),
        *own,
        *callers,
        line("System.Runtime.CompilerServices.TaskAwaiter.GetResult()"),
    ]
    return group.type, group.text.format(**values(chance)), frames


def masstransit(group: Group, chance: random.Random) -> tuple[dict[str, str], bytes]:
    kind, text, frames = _dotnet(group, chance)
    parts = {"ExceptionType": kind, "Message": text, "StackTrace": "\n".join(frames)}
    return {"MT-Reason": "fault", **{f"MT-Fault-{name}": value for name, value in parts.items()}}, b"{}"


def nservicebus(group: Group, chance: random.Random) -> tuple[dict[str, str], bytes]:
    kind, text, frames = _dotnet(group, chance)
    trace, shown = [f"{kind}: {text}", *frames], kind
    if chance.random() < 0.4:
        shown = chance.choice(["System.AggregateException", "Shop.Consumers.Failed"])
        end = "   --- End of inner exception stack trace ---"
        trace = [
            f"{shown}: One or more errors occurred. ({text})",
            f" ---> {kind}: {text}",
            *frames,
            end,
            "   at Shop.Consumers.Base.Run(Int32 n) in /src/Base.cs:line 7",
        ]
        text = f"One or more errors occurred. ({text})" if not group.place else text
    if shown != kind and not group.place:
        shown, trace, text = kind, [f"{kind}: {trace[1].partition(': ')[2]}", *frames], trace[1].partition(": ")[2]
    parts = {"ExceptionType": shown, "Message": text, "StackTrace": "\n".join(trace)}
    return {
        "NServiceBus.FailedQ": group.origin,
        **{f"NServiceBus.ExceptionInfo.{name}": value for name, value in parts.items()},
    }, b"{}"


# --- Python


def dramatiq(group: Group, chance: random.Random) -> tuple[dict[str, str], bytes]:
    root = chance.choice(["/app", "/srv/releases/202401", "/home/deploy/current/src"]) + chance.choice(["", "/service"])
    library = chance.choice(["/usr/local/lib/python3.11", "/opt/venv/lib/python3.12", "/app/.venv/lib/python3.11"])

    def frame(place: str, folder: str) -> list[str]:
        path, _, function = place.rpartition(":")
        return [f'  File "{folder}/{path}", line {chance.randint(1, 900)}, in {function}', "    do(it)"]

    caller = chance.choice(["handle", "handle_again"])
    lines = frame("dramatiq/worker.py:process_message", f"{library}/site-packages") + frame(
        f"tasks/main.py:{caller}", root
    )
    lines += frame(group.place, root)
    for through in reversed(group.through):
        standard = through.startswith("json/")
        lines += frame(through, library if standard else f"{library}/site-packages")
    text = group.text.format(**values(chance))
    last = f"{group.type}: {text}" if text else group.type
    head = "Traceback (most recent call last):"
    trace = [head, *lines, last]
    if chance.random() < 0.3:
        handled = [head, *frame("tasks/cache.py:look", root), "KeyError: 'cache'", ""]
        trace = [*handled, "During handling of the above exception, another exception occurred:", "", *trace]
    if chance.random() < 0.2:
        retry = [
            head,
            *frame("tasks/retry.py:call", root),
            f"tenacity.RetryError: RetryError[<Future at 0x7f{chance.getrandbits(40):x}>]",
        ]
        trace = [*trace, "", "The above exception was the direct cause of the following exception:", "", *retry]
    options = {"traceback": "\n".join(trace) + "\n", "retries": chance.randint(1, 20)}
    return {}, json.dumps({"queue_name": group.origin, "actor_name": "take", "args": [], "options": options}).encode()


def told(group: Group, chance: random.Random) -> tuple[dict[str, str], bytes]:
    parts = {"ExceptionType": group.type, "Message": group.text.format(**values(chance))}
    return {f"MT-Fault-{name}": value for name, value in parts.items()}, b"{}"


Writer = tuple[str, "Callable[[Group, random.Random], tuple[dict[str, str], bytes]]"]
WRITERS: list[tuple[list[Group], list[Writer]]] = [
    (JAVA, [(SPRING, spring)]),
    (DOTNET, [(MASSTRANSIT, masstransit), (NSERVICEBUS, nservicebus)]),
    (PYTHON, [(DRAMATIQ, dramatiq)]),
    (TOLD, [(MASSTRANSIT, told)]),
]
GROUPS = [(group, writers) for groups, writers in WRITERS for group in groups]


def generate(count: int, seed: int) -> list[Failed]:
    """Every group as often as any other, in a random order."""
    chance = random.Random(seed)
    made: list[Failed] = []
    for number in range(count):
        group, writers = GROUPS[number % len(GROUPS)]
        dialect, write = chance.choice(writers)
        headers, body = write(group, chance)
        made.append(Failed(group.name, dialect, group.origin, headers, body))
    chance.shuffle(made)
    return made
