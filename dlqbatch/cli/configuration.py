"""The settings of one command, with its logs set up as they say."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dlqbatch import logs
from dlqbatch.settings import load
from dlqbatch.settings.sources import CONFIG_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dlqbatch.settings import Settings


def settings_from(given: Mapping[str, object], config: Path | None) -> Settings:
    """`given` is what the command line says of them; `config` goes before DLQBATCH_CONFIG."""
    environ = os.environ if config is None else {**os.environ, CONFIG_VARIABLE: str(config)}
    settings = load(given, environ)
    logs.configure(settings.log_level, settings.log_format)
    return settings
