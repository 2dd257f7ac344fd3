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
_empty: list[tuple[str, str]] = []
"""Servers of PostgreSQL, and an empty database of each for a later test."""


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
    """It is as CREATE DATABASE makes it, and nobody is connected to it."""
    with psycopg.connect(_spelt_for_psycopg(url)) as connection:
        found = connection.execute(
            "SELECT FROM pg_class WHERE relnamespace = 'public'::regnamespace UNION ALL SELECT FROM pg_stat_activity "
            "WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid() "
            "UNION ALL SELECT FROM pg_namespace WHERE nspname !~ '^pg_' "
            "AND nspname NOT IN ('public', 'information_schema') "
            "UNION ALL SELECT FROM pg_database d LEFT JOIN pg_db_role_setting s ON s.setdatabase = d.oid "
            "WHERE d.datname = current_database() AND (d.datacl IS NOT NULL OR s.setdatabase IS NOT NULL)"
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
        _rename(connection, name, spare := f"empty_{secrets.token_hex(6)}")
        _empty.append((server, spare))
        made_of = SQL("CREATE DATABASE {} TEMPLATE {}")
        connection.execute(made_of.format(Identifier(name), Identifier(_templates[server])))


def make_empty(server: str, name: str) -> None:
    """A new database, or one that another test had and left empty for its tables: to rename it costs less."""
    with psycopg.connect(server, autocommit=True) as connection:
        for spare in _empty:
            if _is_of(spare[0], server):
                _empty.remove(spare)
                _rename(connection, spare[1], name)
                return
        connection.execute(SQL("CREATE DATABASE {}").format(Identifier(name)))


def _rename(connection: psycopg.Connection, name: str, wanted: str) -> None:
    connection.execute(SQL("ALTER DATABASE {} RENAME TO {}").format(Identifier(name), Identifier(wanted)))


def drop_template(server: str) -> None:
    """That of the server at this address, if there is one, and what is left of its empty databases."""
    for spare in [spare for spare in _empty if _is_of(spare[0], server)]:
        with psycopg.connect(server, autocommit=True) as connection:
            connection.execute(SQL("DROP DATABASE {} WITH (FORCE)").format(Identifier(spare[1])))
        _empty.remove(spare)
    for known, template in [*_templates.items()]:
        if _is_of(known, server):
            with psycopg.connect(_spelt_for_psycopg(server), autocommit=True) as connection:
                connection.execute(SQL("DROP DATABASE {} WITH (FORCE)").format(Identifier(template)))
            del _templates[known]


def _is_of(url: str, server: str) -> bool:
    """Whether both are addresses of databases of one server."""
    one, other = (make_url(_spelt_for_psycopg(each)).set(database="") for each in (url, server))
    return one == other


def _spelt_for_psycopg(url: str) -> str:
    return url.replace("+psycopg", "")
