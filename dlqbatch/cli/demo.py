"""`dlqbatch demo`: show on a real broker what a drain does with three messages."""

from __future__ import annotations

import json
import secrets
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console

from dlqbatch import logs
from dlqbatch.aws.secrets import fetch
from dlqbatch.cli.options import AsJson, SettingPairs, overrides
from dlqbatch.cli.printing import print_error
from dlqbatch.demo import drawing
from dlqbatch.demo.scenario import PARTS, REAL_TTLS, SCALED_TTLS, Result, Trail
from dlqbatch.errors import DlqbatchError
from dlqbatch.settings import load, secrets_of


def demo(
    settings: SettingPairs = None,
    *,
    real_time: Annotated[
        bool, typer.Option("--real-time", help="Wait 10, 15 and 20 seconds in the tiers, not fractions of them.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Watch three messages on a real broker: one passes, one fails for good, one passes at the second try.

    dlqbatch demo
    """
    raise typer.Exit(run_demo(overrides(settings), real_time=real_time, as_json=as_json))


def run_demo(options: Mapping[str, object], *, real_time: bool, as_json: bool) -> int:
    """Run the demo and return the exit code: 0 if all three messages went as expected, 1 if not."""
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # The signal is only noted, because the queues of the demo have to be deleted from the broker first.
        signal.signal(number, lambda received, _: signals.append(received))
    console = Console(stderr=as_json, highlight=False)
    try:
        result = _play(console, options, REAL_TTLS if real_time else SCALED_TTLS, lambda: bool(signals))
    except DlqbatchError as error:
        return print_error(error, as_json=as_json)
    if signals:
        sys.stderr.write("dlqbatch: stopped\n")
        return 128 + signals[0]
    if as_json:
        sys.stdout.write(json.dumps(result.as_dict()) + "\n")
    else:
        drawing.conclude(console, result)
    return 1 if result.differences else 0


def _play(
    console: Console, options: Mapping[str, object], ttls: tuple[int, ...], stopped: Callable[[], bool]
) -> Result:
    from dlqbatch.demo.run import own_settings, perform

    prefix = f"demo-{secrets.token_hex(3)}-"
    with TemporaryDirectory(prefix="dlqbatch-demo-") as folder:
        settings = load({**options, **own_settings(prefix, Path(folder), ttls)}, secrets=fetch)
        logs.hide(secrets_of(settings))
        # A log line for every drain would hide the drawing.
        logs.configure("warning" if settings.log_level == "info" else settings.log_level, settings.log_format)
        trails = [Trail(part) for part in PARTS]
        delays = ", ".join(f"{ttl / 1000:g}" for ttl in ttls)
        console.print(f"{settings.broker_url}: queues named {prefix}*, delays of {delays} s\n")
        with drawing.drawing_on(console, trails) as picture:
            return perform(settings, prefix, trails, picture.show, stopped)
