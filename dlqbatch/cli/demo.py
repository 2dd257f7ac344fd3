"""`dlqbatch demo`: the main job, seen."""

from __future__ import annotations

import json
import secrets
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rich.console import Console

from dlqbatch import logs
from dlqbatch.cli.failure import failed
from dlqbatch.demo import drawing
from dlqbatch.demo.scenario import PARTS, REAL_TTLS, SCALED_TTLS, Trail
from dlqbatch.demo.stage import own_settings, perform
from dlqbatch.errors import DlqbatchError
from dlqbatch.settings import load, secrets_of
from dlqbatch.wiring.secrets import fetch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dlqbatch.demo.scenario import Result


def run_demo(overrides: Mapping[str, object], *, real_time: bool, as_json: bool) -> int:
    """The exit code: 0 if all three messages went as expected, 1 if not."""
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Only noted: whatever is interrupted, what is on the broker has to be deleted.
        signal.signal(number, lambda received, _: signals.append(received))
    console = Console(stderr=as_json, highlight=False)
    try:
        result = _play(console, overrides, REAL_TTLS if real_time else SCALED_TTLS, lambda: bool(signals))
    except DlqbatchError as error:
        return failed(error, as_json=as_json)
    if signals:
        sys.stderr.write("dlqbatch: stopped\n")
        return 128 + signals[0]
    if as_json:
        sys.stdout.write(json.dumps(result.as_dict()) + "\n")
    else:
        drawing.conclude(console, result)
    return 1 if result.differences else 0


def _play(
    console: Console, overrides: Mapping[str, object], ttls: tuple[int, ...], stopped: Callable[[], bool]
) -> Result:
    prefix = f"demo-{secrets.token_hex(3)}-"
    with TemporaryDirectory(prefix="dlqbatch-demo-") as folder:
        settings = load({**overrides, **own_settings(prefix, Path(folder), ttls)}, secrets=fetch)
        logs.hide(secrets_of(settings))
        # A line for every drain would bury what is drawn.
        logs.configure("warning" if settings.log_level == "info" else settings.log_level, settings.log_format)
        trails = [Trail(part) for part in PARTS]
        delays = ", ".join(f"{ttl / 1000:g}" for ttl in ttls)
        console.print(f"{settings.broker_url}: queues named {prefix}*, delays of {delays} s\n")
        with drawing.drawing_on(console, trails) as picture:
            return perform(settings, prefix, trails, picture.show, stopped)
