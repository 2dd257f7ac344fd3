"""The configuration of a run: read from everywhere, checked whole, frozen.

command line or event > environment > secret > application.properties > defaults
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import get_args
from urllib.parse import urlsplit

from pydantic import ValidationError

from dlqbatch import logs
from dlqbatch.amqp.masking import Masking
from dlqbatch.errors import SettingsError
from dlqbatch.logs import Format, plain
from dlqbatch.settings.cloud_options import secret_name
from dlqbatch.settings.options import OPTIONS, Entry, Settings, conflicts, must_be, property_key
from dlqbatch.settings.properties import PropertiesFile
from dlqbatch.settings.sources import CONFIG_VARIABLE, IN_A_SECRET, Environment, Fallback, Overrides, Secret, Source
from dlqbatch.settings.topologies import clashes, topologies, understand
from dlqbatch.settings.urls import SecretUrl, redact, secrets_in, with_login

__all__ = [
    "OPTIONS",
    "SecretUrl",
    "Settings",
    "load",
    "mask_secrets",
    "redact",
    "secrets_of",
    "stated_format",
    "topologies",
]

# The folder with handler.py and this package in it, in a checkout as after an installation.
HOME = Path(__file__).resolve().parents[2]
_FILE_NAME = "application.properties"
_LONGEST_SHOWN = 60
_BEHIND_THE_ENVIRONMENT = 2


def load(
    overrides: Mapping[str, object] | None = None,
    environ: Mapping[str, str] = os.environ,
    *,
    overrides_from: str = "command line",
    secrets: Callable[[str], Mapping[str, object]] | None = None,
) -> Settings:
    """Read every source and check the whole; raise one SettingsError with every problem in it.

    `overrides_from` is the name of the source of the overrides in errors: the command line, or an event. `secrets`
    returns the content of the secret of a name; callers that connect to nothing leave it out, and no secret is read.
    """
    sources: list[Source] = [Overrides(overrides or {}, overrides_from), Environment(environ)]
    path = _config_file(environ)
    if path is not None:
        sources.append(PropertiesFile(path))
    if secrets is not None:
        sources.insert(_BEHIND_THE_ENVIRONMENT, _secret(sources, secrets))
    sources.append(Fallback(path.parent if path else HOME, environ))
    # The first source that says something counts, for each option of a topology as for any other.
    written = {key: entry for source in reversed(sources) for key, entry in source.topologies.items()}
    declared, wrong_topologies = understand(written)
    sources[0].facts["topologies"] = declared
    sources[0].facts["written_in"] = {
        option: entry.where for source in reversed(sources) for option, entry in source.entries.items()
    }
    settings, wrong_values = _check(sources)
    problems = [problem for source in sources for problem in source.problems] + wrong_values + wrong_topologies
    if secrets is not None and settings.database_secret is not None and not problems:
        settings, wrong_login = _with_login(settings, settings.database_secret, secrets)
        problems = wrong_login
    problems = problems or list(clashes(settings))
    if problems:
        raise SettingsError(*problems)
    if not settings.tls_verify:
        loud = "tls_verify is false: the broker's certificate is NOT checked, so anybody can play the broker."
        return settings.model_copy(update={"warnings": (*settings.warnings, loud)})
    return settings


def secrets_of(settings: Settings) -> tuple[str, ...]:
    """Every password that it holds: for the logs to hide, wherever a library may repeat it."""
    urls = (settings.broker_url, settings.database_url, settings.management_url)
    found = [secret for url in urls if url is not None for secret in secrets_in(url.get_secret_value())]
    if settings.webhook_url is not None:
        address = urlsplit(settings.webhook_url.get_secret_value())
        found += [*secrets_in(address.geturl()), address.path, address.query]
    keys = (
        *(settings.console_oidc_client_secret, settings.console_proxy_secret, settings.console_secret),
        *(settings.webhook_secret, settings.pagerduty_key, settings.remote_token),
    )
    return (*found, *(key.get_secret_value() for key in keys if key is not None))


def mask_secrets(settings: Settings) -> None:
    """From now on hide the passwords of these settings, and by their rules the secrets of messages."""
    logs.hide(secrets_of(settings))
    rules = (settings.masking_headers, settings.masking_paths, settings.masking_patterns, settings.masking_shown)
    logs.mask_by(Masking(*rules))


def stated_format(overrides: Mapping[str, object] | None = None, environ: Mapping[str, str] = os.environ) -> Format:
    """The form of the log lines, also where other settings are wrong: the errors are written in that form."""
    sources: list[Source] = [Overrides(overrides or {}, ""), Environment(environ)]
    path = _config_file(environ)
    if path is not None:
        sources.append(PropertiesFile(path))
    entry = _entry(sources, ["log_format"])
    stated = str(entry.value).lower()
    return next((form for form in get_args(Format) if form == stated), "auto")


def _secret(sources: Sequence[Source], ask: Callable[[str], Mapping[str, object]]) -> Source:
    """The secret that the first source names; a source with nothing to say if none does."""
    named = next((source.entries["secret"] for source in sources if "secret" in source.entries), None)
    found = Source()
    try:
        if named is not None:
            name = secret_name(str(named.value))
            content = ask(name)
            found = Secret(name, {key: value for key, value in content.items() if not _is_empty(key, value)})
            found.problems += _emptiness(name, content)
    except SettingsError as error:
        found.problems.extend(error.problems)
    except ValueError:
        pass  # the check of the options says what is wrong with its name
    return found


def _with_login(
    settings: Settings, name: str, ask: Callable[[str], Mapping[str, object]]
) -> tuple[Settings, list[str]]:
    """The settings with the user and the password that RDS keeps in a secret."""
    scheme = settings.database_url.get_secret_value().partition("://")[0]
    if scheme != "postgresql+psycopg":
        key = property_key("database_secret")
        return settings, [f"{key} is a login of PostgreSQL, and the database's address begins with {scheme}://."]
    try:
        content = ask(name)
    except SettingsError as error:
        return settings, list(error.problems)
    user, password = content.get("username"), content.get("password")
    if not (isinstance(user, str) and user and isinstance(password, str) and password):
        return settings, [f"the secret {name} holds no username and password, as one that RDS makes does."]
    url = SecretUrl(with_login(settings.database_url.get_secret_value(), user, password))
    return settings.model_copy(update={"database_url": url}), []


def _is_empty(key: str, value: object) -> bool:
    return key in IN_A_SECRET and (value is None or (isinstance(value, str) and not value.strip()))


def _emptiness(name: str, content: Mapping[str, object]) -> list[str]:
    """A sentence for each empty key of the secret: its value would come from another source, unnoticed."""
    if not content:
        return [f"the secret {name} is an empty object; it is to hold any of {', '.join(IN_A_SECRET)}."]
    empty = [key for key, value in content.items() if _is_empty(key, value)]
    return [f"{key} (secret {name}) is empty; write the address, or leave the key out." for key in empty]


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
    state: dict[str, object] = {}
    for source in sources:
        state = {**source.state(state), **state}  # what an earlier one said counts
    try:
        return Settings.model_validate(state), {}
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
    if "url" in option or option.endswith("_secret") or "@" in text or "://" in text:
        return f"has a wrong value (not shown, it may hold a password); it must be {must_be(option)}"
    return f"is '{plain(text, _LONGEST_SHOWN)}'; it must be {must_be(option)}"
