"""Where values come from: what was given with the call, the environment, and what is left to find out."""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_settings import PydanticBaseSettingsSource

from dlqbatch.settings.options import OPTIONS, Entry, Settings, property_key
from dlqbatch.settings.urls import SecretUrl

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic.fields import FieldInfo

ENVIRONMENT_PREFIX = "DLQBATCH_"
CONFIG_VARIABLE = "DLQBATCH_CONFIG"
_LONGEST_SHOWN = 80


_SQLITE_FILE = "dlqbatch.sqlite3"


class Source(PydanticBaseSettingsSource):
    """Entries by option, and `facts`: what this source knows that is no option."""

    def __init__(self) -> None:
        super().__init__(Settings)
        self.entries: dict[str, Entry] = {}
        self.facts: dict[str, Any] = {}
        self.problems: list[str] = []

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:  # noqa: ARG002 (the library's)
        return self.entries.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return {**self.entries, **self.facts}

    def add(self, option: str, entry: Entry) -> None:
        """Keep what was written; nothing, or empty text, means that it is not set here."""
        value = entry.value
        if isinstance(value, str):
            value = value.strip()
        elif isinstance(value, bool):
            # Python counts True as 1, so that a number would take it.
            value = str(value).lower()
        if value not in (None, ""):
            self.entries[option] = Entry(entry.key, entry.where, value)


class Given(Source):
    """What the caller passed on: options of a command line or of an event."""

    def __init__(self, overrides: Mapping[str, object], given_by: str) -> None:
        super().__init__()
        for key, value in overrides.items():
            option = option_named(key)
            dashed = key.replace("_", "-")
            written = f"--{dashed}" if given_by == "command line" else key
            if option is None:
                guess = closest(key)
                # The guess comes in the caller's own spelling.
                meant = guess and (f"--{guess.replace('_', '-')}" if given_by == "command line" else guess)
                self.problems.append(f"{shown_key(written)} ({given_by}) is no option{_perhaps(meant)}.")
            else:
                self.add(option, Entry(shown_key(written), given_by, value))


class Environment(Source):
    """`DLQBATCH_` variables; one that is no option is a warning, because Kubernetes adds some of its own."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        super().__init__()
        warnings: list[str] = []
        for key in sorted(environ):
            if not key.startswith(ENVIRONMENT_PREFIX) or key == CONFIG_VARIABLE:
                continue
            option = key.removeprefix(ENVIRONMENT_PREFIX).lower()
            if option in OPTIONS and key == variable(option):
                self.add(option, Entry(key, "environment", environ[key]))
            else:
                guess = closest(option)
                meant = _perhaps(guess and variable(guess))
                warnings.append(f"{shown_key(key)} (environment) is no option and was ignored{meant}.")
        self.facts["warnings"] = tuple(warnings)


class Fallback(Source):
    """What no other source said and no constant can say: where the SQLite file is."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        super().__init__()
        self._folder = folder
        self._environ = environ

    def __call__(self) -> dict[str, Any]:
        if "database_url" in self.current_state:
            return {}
        folder = self._folder
        # One that is there already is the one that is meant, also for a user who may only read it. Beside an installed
        # package it would go with the next upgrade.
        is_installed = folder.name in {"site-packages", "dist-packages"}
        if not (folder / _SQLITE_FILE).exists() and (is_installed or not os.access(folder, os.W_OK)):
            folder = _state_folder(self._environ)
        # An absolute path follows the three slashes with one of its own.
        return {
            "database_url": SecretUrl(f"sqlite:///{folder / _SQLITE_FILE}"),
            "database_url_is_default": True,
        }


def _state_folder(environ: Mapping[str, str]) -> Path:
    stated = Path(environ.get("XDG_STATE_HOME", ""))
    if not stated.is_absolute():  # the XDG rule: a relative path is to be ignored
        home = environ.get("HOME")
        stated = (Path(home) if home else Path("~").expanduser()) / ".local" / "state"
    return stated / "dlqbatch"


def option_named(key: str) -> str | None:
    """Find the option behind any spelling: dots, dashes and underscores are one."""
    option = key.replace("-", "_").replace(".", "_")
    return option if option in OPTIONS else None


def closest(key: str) -> str | None:
    wanted = key.lower().replace("-", "_").replace(".", "_")
    found = get_close_matches(wanted, OPTIONS, n=1)
    return found[0] if found else None


def variable(option: str) -> str:
    return ENVIRONMENT_PREFIX + option.upper()


def shown_key(key: str) -> str:
    """Make a key fit to print, whatever is in it."""
    text = key if key.isprintable() else repr(key)[1:-1]
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 1] + "…"


def unknown_property(key: str, where: str) -> str:
    guess = closest(key.removeprefix("dlqbatch."))
    return f"{shown_key(key)} ({where}) is no option{_perhaps(guess and property_key(guess))}."


def _perhaps(meant: str | None) -> str:
    return f"; perhaps {meant} was meant" if meant else "; docs/settings.md lists them all"
