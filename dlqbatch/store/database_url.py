"""The database's URL, read and checked, and how to connect to it; this loads neither SQLAlchemy nor a driver.

The log of runs uses it without SQLAlchemy, the engine makes SQLAlchemy's own URL of it; a test compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Container
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, unquote

from dlqbatch.errors import SettingsError

_URL: Final = re.compile(
    r"(?P<scheme>[\w+]+)://"
    r"(?:(?P<user>[^:/]*)(?::(?P<password>[^@]*))?@)?"
    r"(?:\[(?P<ipv6>[^/?]+)\]|(?P<host>[^/:?]+))?(?::(?P<port>[^/?]*))?"
    r"(?:/(?P<database>[^?]*))?"
    r"(?:\?(?P<query>.*))?"
)
_BY_IAM: Final = "postgresql+iam"
_POSTGRESQL: Final = frozenset({"postgres", "postgresql", "postgresql+psycopg", _BY_IAM})
_EXAMPLES: Final = "it looks like postgresql://user:password@host:5432/database or sqlite:////path/to/file.sqlite3"
_UNKNOWN_OPTION: Final = re.compile(r"(invalid \S+ option ).*", re.DOTALL)


class DatabaseUrl(NamedTuple):
    is_sqlite: bool
    user: str
    password: str
    host: str
    port: int | None
    database: str
    """The name of the database; for SQLite the path of its file."""
    options: dict[str, str]
    """What follows the question mark; hosts and ports of several servers are joined by commas."""
    is_by_iam: bool = False
    """The password is a token of AWS IAM, made for each connection."""

    @property
    def file(self) -> Path:
        return Path(self.database).absolute()

    def for_libpq(self) -> dict[str, str]:
        """Connection parameters by libpq's names."""
        named = {
            "user": self.user,
            "password": self.password,
            "host": self.host,
            "port": str(self.port or ""),
            "dbname": self.database,
        }
        return {name: value for name, value in named.items() if value} | self.options | self.token()

    def token(self) -> dict[str, str]:
        """The password of a connection that is made now, if it is a token; else nothing."""
        if not self.is_by_iam:
            return {}
        from dlqbatch.aws.database_token import token  # noqa: PLC0415  (boto3, and only for those who use it)

        return {"password": token(self.host, self.port or 5432, self.user)}


def parse(url: str) -> DatabaseUrl:
    """SettingsError for a wrong URL; it is never repeated in the error, for it may hold a password."""
    found = _URL.match(url)
    part = {} if found is None else {name: value or "" for name, value in found.groupdict().items()}
    if not part or not (part["port"].isdecimal() or not part["port"]):
        raise SettingsError(f"the database URL cannot be parsed; {_EXAMPLES}")
    scheme, host, database = part["scheme"], part["host"] or part["ipv6"], unquote(part["database"])
    if scheme not in {"sqlite", *_POSTGRESQL}:
        raise SettingsError(f"the database URL starts with '{scheme}:', which is not supported; {_EXAMPLES}")
    if scheme == "sqlite":
        if part["query"] or database in {"", ":memory:"} or database.startswith("file:"):
            raise SettingsError(f"a SQLite URL names a file and takes no options; {_EXAMPLES}")
    elif "@" in host:
        # What follows would connect to, and print, the rest of the password as a host name.
        raise SettingsError("the database URL has more than one '@': write one in a password as %40")
    return DatabaseUrl(
        scheme == "sqlite",
        unquote(part["user"]),
        unquote(part["password"]),
        host,
        int(part["port"]) if part["port"] else None,
        database,
        _options(part["query"]),
        scheme == _BY_IAM,
    )


def _options(query: str) -> dict[str, str]:
    gathered: dict[str, list[str]] = {}
    for name, value in parse_qsl(query):
        gathered.setdefault(name, []).append(value)
    hosts = gathered.get("host", [])
    if "port" not in gathered and any(":" in host for host in hosts):
        # "host=a:1&host=b:2", SQLAlchemy's own spelling; libpq takes the two apart.
        gathered["host"] = [host.partition(":")[0] for host in hosts]
        gathered["port"] = [host.partition(":")[2] for host in hosts]
    return {name: ",".join(values) for name, values in gathered.items()}


def describe_error(error: BaseException, password: str | None) -> str:
    """A database's error in one line, without the password."""
    text = "; ".join(line.strip() for line in str(error).splitlines() if line.strip()) or type(error).__name__
    if password:
        text = text.replace(password, "***")
    # Libpq repeats an option that it does not know: after a ? in a password that was not encoded, it is the rest.
    return _UNKNOWN_OPTION.sub(r"\1(not shown: write a ? in a password as %3F)", text)


def refuses_login(error: BaseException | None) -> bool:
    """Whether a connection failed over its password; the server's words count for nothing, being in any language."""
    connection = getattr(error, "pgconn", None)  # only errors of connecting have one
    return connection is not None and bool(connection.used_password or connection.needs_password)


def connect_options(already: Container[str], connect_timeout: float) -> dict[str, str]:
    """The options of every connection to PostgreSQL that the URL does not have `already`. Seconds."""
    defaults: dict[str, str] = {
        "application_name": "dlqbatch",
        "client_encoding": "utf8",
        "connect_timeout": str(max(2, round(connect_timeout))),  # libpq knows whole seconds, two at least
        # A network that swallows packets ends a wait after half a minute instead of never.
        "keepalives_idle": "10",
        "keepalives_interval": "5",
        "keepalives_count": "4",
        # Keepalives rest while something sent waits to be acknowledged. Milliseconds.
        "tcp_user_timeout": "30000",
    }
    return {name: value for name, value in defaults.items() if name not in already}


def session_settings(statement_timeout: float) -> str:
    """The SQL that comes first on every connection to PostgreSQL. Seconds."""
    # Not by the `options` of the connection: some connection poolers refuse those.
    milliseconds = int(statement_timeout * 1000)
    # Whatever isolation the role or the database has by default: what is written here locks its rows, and under a
    # stricter one every row that two workers look at would be an error. And no JIT: for these statements, the compiling
    # takes longer than what it saves.
    return (
        "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL READ COMMITTED; "
        f"SET statement_timeout = {milliseconds}; SET lock_timeout = {milliseconds}; "
        "SET idle_in_transaction_session_timeout = 60000; SET synchronous_commit = on; SET jit = off"
    )
