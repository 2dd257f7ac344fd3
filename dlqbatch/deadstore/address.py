"""A database URL read as SQLAlchemy reads it, for those who cannot wait for SQLAlchemy to load; a test compares."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote

_URL = re.compile(
    r"[\w+]+://"
    r"(?:(?P<user>[^:/]*)(?::(?P<password>[^@]*))?@)?"
    r"(?:\[(?P<ipv6>[^/?]+)\]|(?P<host>[^/:?]+))?(?::(?P<port>[^/?]*))?"
    r"(?:/(?P<database>[^?]*))?"
    r"(?:\?(?P<query>.*))?"
)


class Address(NamedTuple):
    user: str
    password: str
    host: str
    port: str
    database: str
    """Of SQLite the path of its file."""
    options: dict[str, str]
    """Of the query; hosts and ports of several servers are joined by commas."""

    @property
    def file(self) -> Path:
        return Path(self.database).absolute()

    def for_libpq(self) -> dict[str, str]:
        """Connection parameters by libpq's names."""
        named = {
            "user": self.user,
            "password": self.password,
            "host": self.host,
            "port": self.port,
            "dbname": self.database,
        }
        return {name: value for name, value in named.items() if value} | self.options


def read(url: str) -> Address:
    """ValueError if it is no URL."""
    found = _URL.match(url)
    if found is None:
        raise ValueError("this is no database URL")
    part = {name: value or "" for name, value in found.groupdict().items()}
    return Address(
        unquote(part["user"]),
        unquote(part["password"]),
        part["host"] or part["ipv6"],
        part["port"],
        unquote(part["database"]),
        _options(part["query"]),
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
