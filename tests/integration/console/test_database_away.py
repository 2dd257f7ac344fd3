"""The database goes away under a console that runs, and comes back: the page says so, and then shows it again."""

from __future__ import annotations

import psycopg
from console_client import as_role, made, opened, text_of
from dead_rows import add, row
from psycopg.sql import SQL, Identifier
from sqlalchemy import make_url

from dlqbatch.console.rights import Role


def test_a_database_that_is_away_is_said_and_comes_back(database_url: str, database_server: str) -> None:
    console = made(database_url)
    add(console.engine, row(error_type="TimeoutError", origin_queue="orders"))
    name = Identifier(make_url(database_url).database or "")
    with opened(console) as browser, psycopg.connect(database_server, autocommit=True) as server:
        as_role(browser, console, Role.OPERATOR)
        assert browser.get("/messages?origin=orders").status_code == 200
        server.execute(SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(name))
        ends = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
        server.execute(ends, (make_url(database_url).database,))
        for request in (browser.get("/messages?origin=orders"), browser.get("/api/v1/messages")):
            assert request.status_code == 503
        assert "The database is away" in text_of(browser.get("/messages?origin=orders"))
        form = {"query": "origin=orders", "number": "1", "reason": "x"}
        assert browser.post("/discard", data=form).status_code == 503
        server.execute(SQL("ALTER DATABASE {} ALLOW_CONNECTIONS true").format(name))
        assert "TimeoutError" in text_of(browser.get("/messages?origin=orders"))
        assert browser.post("/discard", data=form).status_code == 303
        # Restarted between two pages: nobody notices.
        server.execute(ends, (make_url(database_url).database,))
        assert browser.get("/messages?status=archived").status_code == 200
