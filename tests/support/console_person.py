"""Somebody at the console, who does only what a person can: look at a page, click on what is visible there, and type.

The first address is the only one that is typed. A person with a mouse and one with a keyboard follow one script.
"""

from __future__ import annotations

import os
import re
import time
from typing import TYPE_CHECKING

from playwright.sync_api import Error
from program import HANGS_AFTER, eventually

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

READING = float(os.environ.get("DLQBATCH_TEST_READING", "0"))
"""Seconds for which a person looks at a new page; a third of it before each click, and before a field is filled in."""
_LETTERS = 8
"""Letters that are typed in a second, where pages are read; what is pasted comes at once."""
_ROUND = 600
"""Presses of Tab after which everything on a page has had its turn."""
_BORN = "performance.timeOrigin"
_HAS_FOCUS = "each => each === document.activeElement"
_IS_NEW = "document.activeElement === document.body"
_IS_CONTENT = "each => !!each.closest('main')"
_INSIDE = "each => each.contains(document.activeElement)"


class Person:
    def __init__(self, page: Page, door: str, reading: float = READING) -> None:
        self.page, self.reading = page, reading
        self.clicks = self.keys = self.letters = 0
        page.goto(door)
        self.reads()

    def reads(self) -> None:
        time.sleep(self.reading)

    def link(self, words: str) -> Locator:
        return self.page.get_by_role("link", name=re.compile(re.escape(words))).first

    def button(self, words: str) -> Locator:
        return self.page.get_by_role("button", name=re.compile(re.escape(words))).first

    def goes_to(self, words: str) -> None:
        """A page of the navigation."""
        self.presses(self.page.get_by_role("navigation", name="Pages").get_by_role("link", name=words, exact=True))

    def follows(self, words: str) -> None:
        self.presses(self.link(words))

    def decides(self, words: str) -> None:
        self.presses(self.button(words))

    def presses(self, what: Locator) -> None:
        """What is pressed leads to another page."""
        before = self.page.evaluate(_BORN)
        self._presses(what)
        assert eventually(lambda: self._is_another_page(before)), f"nothing came of {what}"
        self.reads()

    def unfolds(self, words: str) -> None:
        self._presses(self.page.get_by_text(words, exact=True))

    def writes(self, label: str, text: str, place: int = 0) -> None:
        """`place` is the field's among those of this label."""
        self._enters(self.page.get_by_label(label).nth(place))
        self.page.keyboard.type(text, delay=1000 / _LETTERS if self.reading else 0)
        self.letters += len(text)

    def pastes(self, label: str, text: str) -> None:
        self._enters(self.page.get_by_label(label).first)
        self.page.keyboard.insert_text(text)
        self.keys += 2

    def chooses(self, label: str, option: str) -> None:
        """A list of options takes the beginning of one."""
        field = self.page.get_by_label(label, exact=True).first
        self._enters(field)
        self.page.keyboard.type(option)
        self._takes_the_option()
        self.letters += len(option)
        assert eventually(lambda: self._chosen(field).startswith(option)), self._chosen(field)

    @staticmethod
    def _chosen(field: Locator) -> str:
        return str(field.evaluate("each => each.selectedOptions[0].label"))

    def figure(self, words: str) -> int:
        """A number at the head of the page."""
        figure = self.page.locator(".figure").filter(has=self.page.get_by_text(words, exact=True))
        return int(figure.locator("b").inner_text().replace(",", ""))

    def sees(self, words: str) -> None:
        """Waits for it: the page changes by itself."""
        shown = self.page.locator("body")
        assert eventually(lambda: words in shown.inner_text()), f"{words!r} is not in:\n{shown.inner_text()}"

    def _is_another_page(self, before: float) -> bool:
        try:
            now = self.page.evaluate("document.readyState === 'complete' && performance.timeOrigin")
        except Error:
            return False  # between two pages
        return now not in {before, False}

    def _takes_the_option(self) -> None:
        """A list that is folded takes what is typed at once."""

    def _presses(self, what: Locator) -> None:
        raise NotImplementedError

    def _enters(self, field: Locator) -> None:
        raise NotImplementedError


class WithMouse(Person):
    def _presses(self, what: Locator) -> None:
        time.sleep(self.reading / 3)
        # Only what is visible, still, and under the pointer is clicked.
        what.click(timeout=HANGS_AFTER * 1000)
        self.clicks += 1

    def _enters(self, field: Locator) -> None:
        self._presses(field)

    def _takes_the_option(self) -> None:
        self.page.keyboard.press("Enter")


class WithKeyboard(Person):
    """Keys of the page where it has some, else Tab; never the mouse."""

    def _presses(self, what: Locator) -> None:
        time.sleep(self.reading / 3)
        what.wait_for()
        if key := what.get_attribute("data-key"):
            self._key(key)
            return
        self._reaches(what)
        self._key("Enter")

    def _enters(self, field: Locator) -> None:
        time.sleep(self.reading / 3)
        field.wait_for()
        self._reaches(field)

    def goes_to(self, words: str) -> None:
        before = self.page.evaluate(_BORN)
        self._leaves_the_field()
        self._key("g")
        self._key({"Now": "n", "Messages": "m"}[words])
        assert eventually(lambda: self._is_another_page(before)), f"nothing leads to {words}"
        self.reads()

    def _leaves_the_field(self) -> None:
        if self.page.evaluate("document.activeElement.matches('input, select, textarea')"):
            self._key("Escape")

    def _reaches(self, what: Locator) -> None:
        if what.evaluate(_HAS_FOCUS):
            return
        row = what.locator("xpath=ancestor::*[@data-row]")
        if row.count() and not row.evaluate(_INSIDE):
            self._leaves_the_field()
            for _ in range(_ROUND):
                if row.evaluate(_INSIDE):
                    break
                self._key("j")
        elif self.page.evaluate(_IS_NEW) and what.evaluate(_IS_CONTENT):
            # The link that skips the navigation.
            self._key("Tab")
            self._key("Enter")
        for _ in range(_ROUND):
            if what.evaluate(_HAS_FOCUS):
                return
            self._key("Tab")
        raise AssertionError(f"{what} is not reached by keyboard")

    def _key(self, key: str) -> None:
        self.page.keyboard.press(key)
        self.keys += 1
