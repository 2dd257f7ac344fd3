"""A change of the policy is tried on what failed, before anybody makes it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from console_client import as_role, made, opened, text_of
from dead_rows import add, row

from dlqbatch.console.rights import Role
from dlqbatch.drain.event_config import EventConfig

if TYPE_CHECKING:
    from dlqbatch.console.app import Console


def died(console: Console, event: str, retries: int, ago: timedelta = timedelta(hours=1)) -> None:
    add(console.engine, row(event=event, retry_count=retries), at=datetime.now(UTC) - ago)


def test_other_numbers_are_tried_on_last_week_and_the_table_stays_as_it_is(sqlite_url: str) -> None:
    console = made(sqlite_url)
    EventConfig(console.engine).set("orders.#", 3)
    for retries in (3, 3, 5):
        died(console, "orders.created", retries)
    died(console, "orders.created", 3, timedelta(days=8))
    died(console, "mail", 2)
    with opened(console) as browser:
        as_role(browser, console, Role.READER)
        assert "orders.#=3" in text_of(browser.get("/events/try"))
        page = text_of(browser.get("/events/try", params={"numbers": "orders.#=4\r\n\r\nmail=2\r\n", "since": "7d"}))
        # 4 retries each, 3 messages: 1 had died sooner, of 2 nobody knows, and 1 retry more in all; 10, 15, 20, 20 s.
        assert "orders.# 4 3 0 1 0 0 2 1 65 s" in page
        assert "mail 2 1 1 0 0 0 0 0" in page
        assert "dlqbatch events simulate --since 7d &#39;orders.#=4&#39; mail=2" in page
        assert "Set it" not in page
        assert "orders.# 4 4 " in text_of(browser.get("/events/try", params={"since": "30d", "numbers": "orders.#=4"}))
        assert "Nothing of these events" in text_of(browser.get("/events/try", params={"numbers": "none=1"}))
        for wrong in ({"numbers": "orders"}, {"numbers": "orders.#=-1"}, {"numbers": "a=1", "since": "soon"}):
            assert browser.get("/events/try", params=wrong).status_code == 422
        as_role(browser, console, Role.ADMIN)
        assert "Set it" in text_of(browser.get("/events/try", params={"numbers": "orders.#=4"}))
    (kept,) = EventConfig(console.engine).read()
    assert (kept.name, kept.max_retries) == ("orders.#", 3)
