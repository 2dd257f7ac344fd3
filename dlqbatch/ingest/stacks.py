r"""Stack traces, as far as grouping needs them: what was raised, and through which frames.

Java    `\tat shop.Stock.take(Stock.java:12)`, nearest first, `Caused by: ` after what it caused
.NET    `   at Shop.Stock.Take(String id) in C:\src\Stock.cs:line 12`, nearest first, ` ---> ` before the inner one
Python  `  File "/app/shop/stock.py", line 12, in take`, nearest last, the cause before what it caused
Node    `    at take (/app/src/stock.js:12:5)`, nearest first
Go      `main.take(...)` and below it `\t/app/stock.go:12`, nearest first
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Final, NamedTuple

# So many characters are read from the beginning, and as many from the end, where Python's newest frame is.
_READ: Final = 32_768


class Frame(NamedTuple):
    name: str
    """Without line numbers and what a compiler numbers."""
    is_application: bool


class Trace(NamedTuple):
    """One failure of a chain; its frames begin nearest to where it was raised."""

    type: str | None
    frames: tuple[Frame, ...]
    is_dotnet: bool = False


def application_frame(trace: Trace) -> str | None:
    return next((frame.name for frame in trace.frames if frame.is_application), None)


def traces(stack: str) -> tuple[Trace, ...]:
    """The chain of failures, the outermost first; empty if there is not one frame in it."""
    if len(stack) > 2 * _READ:
        stack = f"{stack[:_READ]}\n{stack[-_READ:]}"
    lines = stack.splitlines()
    if any(_PYTHON_FRAME.match(line) for line in lines):
        chain = tuple(_python(lines))
    elif any(_GO_PLACE.match(line) for line in lines):
        chain = (_go(lines),)
    else:
        chain = _with_at(lines)
    return chain if any(trace.frames for trace in chain) else ()


# --- Java, .NET and Node: lines that begin with `at`

_AT: Final = re.compile(r"\s*at (?:async |new )?(\S.*)")
_NODE_PLACE: Final = re.compile(
    r"(?:(.{1,300}?) )?\(?((?:file://|node:|internal/|[A-Za-z]:\\|/|webpack:)[^()]{0,600}?):\d+:\d+\)?\s*$"
)
_NODE_BUILT_IN: Final = re.compile(r"\((?:<anonymous>|native|index \d+)\)\s*$")
_JAVA_PLACE: Final = re.compile(
    r"\((?:[\w$-]{1,200}\.(?:java|kt|scala|groovy|clj):\d+|Native Method|Unknown Source|<generated>|"
    r"[\w$-]{1,200}\.(?:java|kt|scala|groovy))\)"
)
_CAUSED: Final = re.compile(r"\s*(Caused by|Suppressed|Wrapped by): (.*)")
_INNER: Final = re.compile(r"\s*-{3}> (?:\(Inner Exception #\d+\) )?(.*)")
_TYPE: Final = re.compile(
    r'(?:Exception in thread "[^"]*" |Unhandled exception\. |Uncaught )?([A-Za-z_$][\w.$+`]*)(?:\[.*?\])?(?=[:\s(]|$)'
)
_CSHARP_ASYNC: Final = re.compile(r"[.+]<(\w+)>d__\d+(?:`\d+)?(?:\[.*?\])?\.MoveNext$")
_CSHARP_LAMBDA: Final = re.compile(
    r"[.+]<>c(?:__DisplayClass\d+_\d+)?(?:`\d+)?(?:\[.*?\])?[.+]<{1,2}(\w+)>\w__\w+(?:>d(?:__\d+)?\.MoveNext)?$"
)
_CSHARP_MADE: Final = re.compile(r"<(\w+)>[\w|]*")
_ARITY: Final = re.compile(r"`\d+|\[[^\]]*\]")
_JAVA_AT_RUN_TIME: Final = re.compile(r"/(?:0x)?[0-9a-f]+(?=\.)")
_JAVA_MADE: Final = re.compile(r"\$\$\w{0,100}(?:Lambda|CGLIB|FastClass|Enhancer)[\w$]*|(?<=\$)\d+(?:\$\d+)*$")
_JAVA_LAMBDA: Final = re.compile(r"\.lambda\$(\w+?)\$\d+$")

_JAVA_FRAMEWORKS: Final = tuple(
    """
    $Proxy akka. brave. ch.qos.logback. clojure. com.amazonaws. com.fasterxml. com.google.common. com.google.gson.
    com.google.protobuf. com.microsoft.sqlserver. com.mongodb. com.mysql. com.netflix. com.rabbitmq. com.sun.
    com.zaxxer. datadog. feign. groovy. io.github.resilience4j. io.grpc. io.lettuce. io.micrometer. io.netty.
    io.opentelemetry. io.quarkus. io.vertx. jakarta. java. javax. jdk. kotlin. kotlinx. net.bytebuddy. okhttp3.
    oracle. org.apache. org.aspectj. org.codehaus. org.eclipse. org.elasticsearch. org.hibernate. org.jboss.
    org.junit. org.mongodb. org.postgresql. org.redisson. org.slf4j. org.springframework. reactor. redis.clients.
    retrofit2. rx. scala. software.amazon. sun.
    """.split()  # noqa: SIM905  (a hundred quoted words are harder to read)
)
_DOTNET_FRAMEWORKS: Final = tuple(
    """
    Amazon. Autofac. AutoMapper. Azure. Castle. Dapper. Elasticsearch. FluentValidation. Google. GreenPipes. Grpc.
    Hangfire. lambda_method MassTransit. MediatR. Microsoft. MongoDB. MySql. MySqlConnector. Nest. Newtonsoft.
    NHibernate. Npgsql. NServiceBus. OpenTelemetry. Oracle. Polly. Quartz. RabbitMQ. Refit. RestSharp. Serilog.
    StackExchange. System. Topshelf.
    """.split()  # noqa: SIM905  (a hundred quoted words are harder to read)
)


def _with_at(lines: list[str]) -> tuple[Trace, ...]:
    types: list[str | None] = [None]
    frames: list[list[Frame]] = [[]]
    current, at, is_dotnet = frames[0], 0, False
    for line in lines:
        call = _AT.match(line)
        inner = None if call is not None else _INNER.match(line)
        cause = None if call is not None else _CAUSED.match(line)
        if call is not None:
            frame, from_dotnet = _frame_at(call[1])
            is_dotnet |= from_dotnet
            current.append(frame)
        elif inner is not None or (cause is not None and cause[1] != "Suppressed"):
            is_dotnet |= inner is not None
            types.append(_type_of(inner[1] if inner is not None else line.partition(": ")[2]))
            frames.append([])
            current, at = frames[-1], len(frames) - 1
        elif cause is not None:
            # What was suppressed failed on the way out, and is no cause.
            current = []
        elif "--- End of inner exception stack trace ---" in line:
            # .NET goes on with the frames of what encloses it.
            at = max(at - 1, 0)
            current = frames[at]
        elif types[0] is None and frames == [[]]:
            types[0] = _type_of(line)
    return tuple(Trace(name, tuple(each), is_dotnet) for name, each in zip(types, frames, strict=True))


def _type_of(line: str) -> str | None:
    found = _TYPE.match(line.strip()[:1000])
    return found[1] if found else None


def _frame_at(call: str) -> tuple[Frame, bool]:
    """The frame, and whether it is one of .NET."""
    call = call[:2000]
    if _JAVA_PLACE.search(call) is None:
        if _NODE_BUILT_IN.search(call) is not None:
            return Frame(call.partition(" (")[0], is_application=False), False
        node = _NODE_PLACE.match(call)
        if node is not None:
            return _node_frame(node[1] or "", node[2]), False
        return _dotnet_frame(call), True
    # A module or a class loader may stand in front, and a number behind the slash of a class made at run time.
    name = _JAVA_AT_RUN_TIME.sub("", call.partition("(")[0]).rpartition("/")[2]
    name = _JAVA_LAMBDA.sub(r".\1", name)
    owner, _, method = name.rpartition(".")
    name = f"{_JAVA_MADE.sub('', owner)}.{_JAVA_MADE.sub('', method)}"
    made = "$Proxy" in name or "<generated>" in call or ".reflect.Generated" in name
    return Frame(name, not made and not name.startswith(_JAVA_FRAMEWORKS)), False


def _dotnet_frame(call: str) -> Frame:
    name = call.partition("(")[0].partition(" in ")[0].rstrip()
    name = _CSHARP_ASYNC.sub(r".\1", name)
    name = _CSHARP_LAMBDA.sub(r".\1", name)
    name = _ARITY.sub("", _CSHARP_MADE.sub(r"\1", name)).replace("+", ".")
    return Frame(name, not name.startswith(_DOTNET_FRAMEWORKS))


def _node_frame(name: str, place: str) -> Frame:
    path = place.replace("\\", "/")
    outside = "node_modules/" in path or path.startswith(("node:", "internal/"))
    return Frame(f"{_module(path)}:{_NODE_ALIAS.sub('', name)}", not outside)


_NODE_ALIAS: Final = re.compile(r" \[as .*\]$|^Object\.|^Module\.")

# --- Python

_PYTHON_FRAME: Final = re.compile(r'\s*(?:\| *)*File "([^"]{1,1000})", line \d+(?:, in (.{1,300}))?\s*$')
_PYTHON_OUTSIDE: Final = re.compile(r"(?:site|dist)-packages/|/lib(?:64)?/python\d|\\lib\\|^<")
_PYTHON_TYPE: Final = re.compile(r"([A-Za-z_][\w.]*)(?::|$)")
_DIRECT: Final = "The above exception was the direct cause of the following exception:"
_ON_THE_WAY: Final = "During handling of the above exception, another exception occurred:"


def _python(lines: list[str]) -> Iterator[Trace]:
    chains: list[list[Trace]] = [[]]
    frames: list[Frame] = []
    name: str | None = None
    for line in (*lines, _DIRECT):
        frame = _PYTHON_FRAME.match(line)
        if frame is not None:
            path = frame[1].replace("\\", "/")
            function = (frame[2] or "").replace("<locals>.", "")
            frames.insert(0, Frame(f"{_module(path)}:{function}", _PYTHON_OUTSIDE.search(frame[1]) is None))
            name = None
        elif line.strip() in {_DIRECT, _ON_THE_WAY}:
            chains[-1].insert(0, Trace(name, tuple(frames)))
            frames, name = [], None
            if line.strip() == _ON_THE_WAY:
                # What was being handled is no cause of what happened then.
                chains.append([])
        elif frames and name is None and not line.startswith((" ", "\t")):
            found = _PYTHON_TYPE.match(line)
            name = found[1] if found else None
    yield from chains[-1]


def _module(path: str) -> str:
    """The last two parts: where a program is installed differs from host to host and from release to release."""
    return "/".join(path.rstrip("/").split("/")[-2:])


# --- Go

_GO_PLACE: Final = re.compile(r"\t(\S{1,1000}\.go):\d+(?: \+0x[0-9a-f]+)?\s*$")
_GO_CALL: Final = re.compile(r"(?:created by )?(\S{1,500}?)(?:\([^()]*\))?(?: in goroutine \d+)?\s*$")
_GO_CLOSURE: Final = re.compile(r"(?:\.func\d+(?:\.\d+)*)+$|\[\.\.\.\]")


def _go(lines: list[str]) -> Trace:
    frames: list[Frame] = []
    for call, line in pairwise(lines):
        place = _GO_PLACE.match(line)
        if place is None:
            continue
        found = _GO_CALL.match(call)
        name = _GO_CLOSURE.sub("", found[1]) if found else ""
        outside = "/pkg/mod/" in place[1] or "/go/src/" in place[1] or "/vendor/" in place[1]
        frames.append(Frame(name, not outside and not name.startswith(("runtime.", "panic"))))
    return Trace(None, tuple(frames))
