"""The configuration of a run: read from everywhere, checked whole, frozen.

command line or event > environment > application.properties > defaults
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from dlqbatch.errors import SettingsError
from dlqbatch.settings.options import OPTIONS, Entry, Settings, conflicts, must_be, property_key
from dlqbatch.settings.properties import PropertiesFile
from dlqbatch.settings.sources import CONFIG_VARIABLE, Environment, Fallback, Given, Source
from dlqbatch.settings.urls import SecretUrl, redact

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["OPTIONS", "SecretUrl", "Settings", "load", "redact"]

# The folder with handler.py and this package in it, in a checkout as after an installation.
HOME = Path(__file__).resolve().parents[2]
_FILE_NAME = "application.properties"
_LONGEST_SHOWN = 60


def load(
    overrides: Mapping[str, object] | None = None,
    environ: Mapping[str, str] = os.environ,
    *,
    given_by: str = "command line",
) -> Settings:
    """Read every source and check the whole; raise one SettingsError with every problem in it.

    `given_by` is what the error calls the source of the overrides: the command line, or an event.
    """
    sources: list[Source] = [Given(overrides or {}, given_by), Environment(environ)]
    path = _config_file(environ)
    if path is not None:
        sources.append(PropertiesFile(path))
    sources.append(Fallback(path.parent if path else HOME, environ))
    settings, wrong_values = _check(sources)
    problems = [problem for source in sources for problem in source.problems] + wrong_values
    if problems:
        raise SettingsError(*problems)
    if not settings.tls_verify:
        loud = "tls_verify is false: the broker's certificate is NOT checked, so anybody can play the broker."
        return settings.model_copy(update={"warnings": (*settings.warnings, loud)})
    return settings


def _config_file(environ: Mapping[str, str]) -> Path | None:
    named = environ.get(CONFIG_VARIABLE)
    if named:
        return Path(named).absolute()
    # Never the working directory: a cron job or a shell elsewhere must not change what a run does.
    beside = HOME / _FILE_NAME
    return beside if beside.exists() else None


def _check(sources: Sequence[Source]) -> tuple[Settings, list[str]]:
    """Build the settings; what is wrong is left out, so that the rest is checked too."""
    problems: list[str] = []
    while True:
        settings, wrong = _build(sources)
        for option, detail in wrong.items():
            entry = _entry(sources, [option])
            problems.append(f"{entry.key} ({entry.where}) {detail or _wrong_value(option, entry)}.")
            for source in sources:
                source.entries.pop(option, None)
        if settings is not None:
            break
    for options, relation in conflicts(settings):
        entry = _entry(sources, options)
        problems.append(f"{entry.key} ({entry.where}) {relation}.")
    return settings, problems


def _build(sources: Sequence[Source]) -> tuple[Settings | None, dict[str, str]]:
    try:
        # The checker sees the fields only, not what BaseSettings itself takes.
        return Settings(_build_sources=(tuple(sources), {})), {}  # type: ignore[call-arg]
    except ValidationError as exc:
        # Kept apart from the library's error, which holds the values.
        found = exc.errors(include_url=False, include_input=False)
    wrong: dict[str, str] = {}
    for error in found:
        own = error["ctx"]["error"] if error["type"] == "value_error" else ""
        wrong.setdefault(str(error["loc"][0]), str(own))
    return None, wrong


def _entry(sources: Iterable[Source], options: Iterable[str]) -> Entry:
    names = list(options)
    written = (source.entries[option] for option in names for source in sources if option in source.entries)
    return next(written, Entry(property_key(names[0]), "default", None))


def _wrong_value(option: str, entry: Entry) -> str:
    value = entry.value
    text = value if isinstance(value, str) else repr(value)
    # Anything may have been pasted into the wrong option, also an address with its password.
    if "url" in option or "@" in text or "://" in text:
        return f"has a wrong value (not shown, it may hold a password); it must be {must_be(option)}"
    text = text if text.isprintable() else repr(text)[1:-1]
    shown = text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 1] + "…"
    return f"is '{shown}'; it must be {must_be(option)}"
