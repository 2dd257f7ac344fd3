"""The settings of one command, with its logs set up as they say."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dlqbatch import logs
from dlqbatch.errors import DlqbatchError
from dlqbatch.settings import load, secrets_of, stated_format
from dlqbatch.settings.sources import CONFIG_VARIABLE
from dlqbatch.wiring.secrets import fetch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dlqbatch.settings import Settings


def settings_from(given: Mapping[str, object], config: Path | None) -> Settings:
    """`given` is what the command line says of them; `config` goes before DLQBATCH_CONFIG."""
    environ = os.environ if config is None else {**os.environ, CONFIG_VARIABLE: str(config)}
    try:
        settings = load(given, environ, secrets=fetch)
    except DlqbatchError:
        logs.configure(style=stated_format(given, environ))
        raise
    logs.hide(secrets_of(settings))
    logs.configure(settings.log_level, settings.log_format)
    return settings
