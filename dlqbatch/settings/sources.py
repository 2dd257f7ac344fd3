"""The sources of settings: a command line or an event, the environment, a secret, and the default database."""

from __future__ import annotations

import os
from collections.abc import Container, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Self

from dlqbatch.logs import plain
from dlqbatch.settings.options import OPTIONS, Entry, Settings, property_key
from dlqbatch.settings.topologies import canonical
from dlqbatch.settings.urls import SecretUrl, is_secret

ENVIRONMENT_PREFIX = "DLQBATCH_"
CONFIG_VARIABLE = "DLQBATCH_CONFIG"
IN_A_SECRET = ("broker_url", "database_url", "management_url", "webhook_url")
SECRETS = frozenset(name for name, field in Settings.model_fields.items() if is_secret(field.annotation))
"""The options whose values are never shown. Each can be in a file, which `DLQBATCH_…_FILE` names."""
IN_A_FILE = "_file"
_LONGEST_FILE = 64 * 1024
_LONGEST_SHOWN = 80
_SQLITE_FILE = "dlqbatch.sqlite3"


class Source:
    """The entries of one source by option, and its `facts`, which are no options."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.topologies: dict[str, Entry] = {}
        """The options of topologies by `topology.NAME.OPTION`; those of all sources are checked together."""
        self.facts: dict[str, Any] = {}
        self.problems: list[str] = []

    def state(self, stated: Container[str]) -> dict[str, Any]:  # noqa: ARG002  (for sources that fill what is open)
        """Its entries and facts; `stated` are the options that a source before it has set."""
        return {**self.entries, **self.facts}

    def add(self, option: str, entry: Entry) -> None:
        """Keep an entry; None or empty text means that the option is not set here."""
        value = entry.value
        if isinstance(value, str):
            value = value.strip()
        elif isinstance(value, bool):
            # Python counts True as 1, so that a number would take it.
            value = str(value).lower()
        if value not in (None, ""):
            self.entries[option] = Entry(entry.key, entry.where, value)

    def add_to_topology(self, key: str, entry: Entry) -> None:
        value = str(entry.value).strip()
        if value:
            self.topologies[key] = Entry(entry.key, entry.where, value)


class Spelled(str):
    """An option that has a flag of another name."""

    __slots__ = ("written",)

    written: str
    """The flag as it was written."""

    def __new__(cls, option: str, written: str) -> Self:
        made = super().__new__(cls, option)
        made.written = written
        return made


class Overrides(Source):
    """The options of a command line or of an event."""

    def __init__(self, overrides: Mapping[str, object], where: str) -> None:
        super().__init__()
        for key, value in overrides.items():
            option = option_named(key)
            dashed = key.replace("_", "-")
            written = f"--{dashed}" if where == "command line" else key
            if isinstance(key, Spelled):
                written = key.written
            of_topology = canonical(key)
            if value == [] or (isinstance(value, str) and not value.strip()):
                # Without this error another source would count, and the run would work on other queues.
                self.problems.append(f"{shown_key(written)} ({where}) is empty; give it a value, or leave it out.")
            elif of_topology is not None:
                self.add_to_topology(of_topology, Entry(shown_key(written), where, value))
            elif option is None:
                # Only --set accepts an unknown name; the suggestion is spelled in the same way.
                spelling = "-s {}" if where == "command line" else "{}"
                guess = closest(key)
                meant = _perhaps(guess and spelling.format(guess))
                self.problems.append(f"{spelling.format(shown_key(key))} ({where}) is no option{meant}.")
            else:
                self.add(option, Entry(shown_key(written), where, value))


class Secret(Source):
    """The content of a secret; a key that does not belong there is a problem, whatever its value is."""

    def __init__(self, name: str, content: Mapping[str, object]) -> None:
        super().__init__()
        where = f"secret {name}"
        for key, value in content.items():
            shown = shown_key(key)
            if key not in IN_A_SECRET:
                guess = get_close_matches(key.lower(), IN_A_SECRET, n=1)
                meant = f"; perhaps {guess[0]} was meant" if guess else f"; it may hold {', '.join(IN_A_SECRET)}"
                self.problems.append(f"{shown} ({where}) is nothing that a secret holds{meant}.")
            elif value is not None and not isinstance(value, str):
                self.problems.append(f"{shown} ({where}) is no text; write the whole address between quotes.")
            else:
                self.add(key, Entry(shown, where, value))


class Environment(Source):
    """`DLQBATCH_` variables. An unknown name is only a warning, because Kubernetes adds variables of its own."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        super().__init__()
        warnings: list[str] = []
        for key in sorted(environ):
            if not key.startswith(ENVIRONMENT_PREFIX) or key == CONFIG_VARIABLE:
                continue
            option = key.removeprefix(ENVIRONMENT_PREFIX).lower()
            of_a_file = option.removesuffix(IN_A_FILE)
            if option in OPTIONS and key == variable(option):
                self.add(option, Entry(key, "environment", environ[key]))
            elif of_a_file in SECRETS and key == variable(option):
                if environ[key].strip():
                    self._add_from_file(of_a_file, key, environ)
            else:
                guess = closest(option)
                meant = _perhaps(guess and variable(guess))
                warnings.append(f"{shown_key(key)} (environment) is no option and was ignored{meant}.")
        self.facts["warnings"] = tuple(warnings)

    def _add_from_file(self, option: str, key: str, environ: Mapping[str, str]) -> None:
        """Read the secret that a platform has mounted as a file, such as one of Docker, Kubernetes or systemd."""
        path = environ[key].strip()
        where = f"file {shown_key(path)}"
        if environ.get(variable(option), "").strip():
            self.problems.append(f"{key} and {variable(option)} are both set; leave one of them out.")
            return
        try:
            with Path(path).open(encoding="utf-8") as file:
                content = file.read(_LONGEST_FILE + 1).strip()
        except (OSError, ValueError) as error:  # a ValueError is a path or a text that is none
            why = getattr(error, "strerror", None) or "it is no text in UTF-8"
            self.problems.append(f"{key} ({where}) cannot be read: {why}.")
            return
        if not content or len(content) > _LONGEST_FILE:
            wrong = f"holds more than {_LONGEST_FILE:,} characters" if content else "is empty"
            self.problems.append(f"{key} ({where}) {wrong}; it is to hold the value and nothing else.")
            return
        self.add(option, Entry(key, where, content))


class Fallback(Source):
    """The default of `database_url`, a SQLite file whose folder depends on the machine."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        super().__init__()
        self._folder = folder
        self._environ = environ

    def state(self, stated: Container[str]) -> dict[str, Any]:
        if "database_url" in stated:
            return {}
        folder = self._folder
        # A file that is there is used, also by a user who may only read it. A new one is not made beside an installed
        # package, whose next upgrade would delete it.
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
    """The option of this name; dots, dashes and underscores count as equal."""
    option = key.replace("-", "_").replace(".", "_")
    return option if option in OPTIONS else None


def closest(key: str) -> str | None:
    wanted = key.lower().replace("-", "_").replace(".", "_")
    found = get_close_matches(wanted, OPTIONS, n=1)
    return found[0] if found else None


def variable(option: str) -> str:
    return ENVIRONMENT_PREFIX + option.upper()


def shown_key(key: str) -> str:
    return plain(key, _LONGEST_SHOWN)


def unknown_property(key: str, where: str) -> str:
    guess = closest(key.removeprefix("dlqbatch."))
    return f"{shown_key(key)} ({where}) is no option{_perhaps(guess and property_key(guess))}."


def _perhaps(meant: str | None) -> str:
    return f"; perhaps {meant} was meant" if meant else "; docs/settings.md lists them all"
