"""Stores with their tables, copied from one that this process upgraded before: an upgrade for each test costs more.

An SQLite file is copied, a database of PostgreSQL is made from a template. Tests of the upgrade itself call `upgrade`.
"""

from __future__ import annotations

import atexit
import functools
import secrets
import shutil
import tempfile
from pathlib import Path

import psycopg
from psycopg.sql import SQL, Identifier
from sqlalchemy import make_url

from dlqbatch.store import migrate

_templates: dict[str, str] = {}
"""The template's name for each server of PostgreSQL."""


def make_tables(url: str) -> None:
    """What `upgrade` does, faster where the database of this test is still empty."""
    parsed = make_url(url)
    name = parsed.database or ""
    if parsed.get_backend_name() == "sqlite" and name and not Path(name).exists():
        shutil.copy(_sqlite_file(), name)
    elif parsed.get_backend_name() == "postgresql" and name.startswith("test_") and _is_untouched(url):
        _make_anew(parsed.set(database="postgres").render_as_string(hide_password=False), name)
    else:
        migrate.upgrade(url)


@functools.cache
def _sqlite_file() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="dlqbatch-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    migrate.upgrade(f"sqlite:///{folder / 'store.sqlite3'}")
    return folder / "store.sqlite3"


def _is_untouched(url: str) -> bool:
    """It is empty, and nobody is connected to it."""
    with psycopg.connect(_spelt_for_psycopg(url)) as connection:
        found = connection.execute(
            "SELECT FROM pg_class WHERE relnamespace = 'public'::regnamespace UNION ALL SELECT FROM pg_stat_activity "
            "WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
        )
        return found.fetchone() is None


def _make_anew(server: str, name: str) -> None:
    with psycopg.connect(_spelt_for_psycopg(server), autocommit=True) as connection:
        if server not in _templates:
            template = f"template_{secrets.token_hex(6)}"
            connection.execute(SQL("CREATE DATABASE {}").format(Identifier(template)))
            migrate.upgrade(make_url(server).set(database=template).render_as_string(hide_password=False))
            _templates[server] = template
            # A database that somebody is connected to is no template.
            ends = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
            connection.execute(ends, (template,))
        connection.execute(SQL("DROP DATABASE {} WITH (FORCE)").format(Identifier(name)))
        made_of = SQL("CREATE DATABASE {} TEMPLATE {}")
        connection.execute(made_of.format(Identifier(name), Identifier(_templates[server])))


def drop_template(server: str) -> None:
    """That of the server at this address, if there is one."""
    wanted = make_url(_spelt_for_psycopg(server))
    for known, template in [*_templates.items()]:
        if make_url(_spelt_for_psycopg(known)) == wanted:
            with psycopg.connect(_spelt_for_psycopg(server), autocommit=True) as connection:
                connection.execute(SQL("DROP DATABASE {} WITH (FORCE)").format(Identifier(template)))
            del _templates[known]


def _spelt_for_psycopg(url: str) -> str:
    return url.replace("+psycopg", "")
