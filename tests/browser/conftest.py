"""A real Chromium on a real console; every page reports what its policy refused (CSP) and where its script failed."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import sync_playwright
from program import HANGS_AFTER, Program, eventually

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator

    from playwright.sync_api import Browser, BrowserContext

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


class Site:
    """A console that runs, and the address that lets in; behind a proxy there is none."""

    def __init__(self, process: subprocess.Popen[str], said: dict[str, str]) -> None:
        self.process, self.address, self.door = process, said["address"], said.get("open", "")

    def __call__(self, place: str) -> str:
        return self.address + place


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    # A browser that is not there fails the run: scripts/test installs it.
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        yield browser
        browser.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Site]]:
    begun: list[subprocess.Popen[str]] = []

    def one(**settings: Any) -> Site:
        role = settings.pop("role", "admin")
        given = {name: str(value) for name, value in settings.items()}
        program = Program({"console_address": "127.0.0.1:0", **given})
        process = program.start("console", "--json", "--role", role)
        begun.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        return Site(process, json.loads(line))

    yield one
    for process in begun:
        process.terminate()
        assert eventually(lambda process=process: process.poll() is not None)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


@pytest.fixture
def reports() -> list[str]:
    """What pages complained about: each test that opens pages ends with none."""
    return []


@pytest.fixture
def enter(chromium: Browser, reports: list[str]) -> Iterator[Callable[..., BrowserContext]]:
    """A browser of its own, logged in; `scripted=False` runs no script."""
    opened: list[BrowserContext] = []

    def one(site: Site, *, scripted: bool = True, dark: bool = False, width: int = 1280) -> BrowserContext:
        context = chromium.new_context(
            java_script_enabled=scripted,
            color_scheme="dark" if dark else "light",
            viewport={"width": width, "height": 860},
            reduced_motion="reduce",
        )
        context.set_default_timeout(HANGS_AFTER * 1000)
        opened.append(context)

        def listen(page: Any) -> None:
            page.on("console", lambda each: reports.append(each.text) if each.type in {"error", "warning"} else None)
            page.on("pageerror", lambda each: reports.append(str(each)))

        context.on("page", listen)
        page = context.new_page()
        page.goto(site.door)
        page.close()
        return context

    yield one
    for context in opened:
        context.close()
