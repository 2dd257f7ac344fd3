"""`dlqbatch demo`: show on a real broker what a drain does with three messages."""

from __future__ import annotations

import json
import os
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
from dlqbatch.cli.console import RoleName, server
from dlqbatch.cli.options import AsJson, SettingPairs, overrides
from dlqbatch.cli.printing import print_error, remark
from dlqbatch.demo import drawing
from dlqbatch.demo.scenario import PARTS, REAL_TTLS, SCALED_TTLS, Result, Trail
from dlqbatch.errors import DlqbatchError
from dlqbatch.settings import load, mask_secrets


def demo(
    settings: SettingPairs = None,
    *,
    real_time: Annotated[
        bool, typer.Option("--real-time", help="Wait 10, 15 and 20 seconds in the tiers, not fractions of them.")
    ] = False,
    with_console: Annotated[
        bool, typer.Option("--console", help="Fail some hundred messages instead, and open the console on them.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Watch three messages on a real broker: one passes, one fails for good, one passes at the second try.

    With --console messages of four causes are dead, and it prints the address of a console, until a signal. What it
    made on the broker is deleted at the end.

    dlqbatch demo
    """
    if with_console and real_time:
        raise typer.BadParameter("nothing is delayed with --console", param_hint="--real-time")
    if with_console:
        show_incident(overrides(settings), as_json=as_json)
        return
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


def show_incident(options: Mapping[str, object], *, as_json: bool) -> None:
    """Fail messages of four causes, and serve the console on them until a signal."""
    from dlqbatch.demo.incident import CAUSES, incident, settings_of

    prefix = f"demo-{secrets.token_hex(3)}-"
    stopped: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        # Noted until the console takes the signals: what stands on the broker has to be deleted first.
        signal.signal(number, lambda received, _: stopped.append(received))
    signal.signal(signal.SIGHUP, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with TemporaryDirectory(prefix="dlqbatch-demo-") as folder:
        own = settings_of(prefix, Path(folder))
        settings = load({"console_address": "127.0.0.1:0", **options, **own}, secrets=fetch)
        mask_secrets(settings)
        logs.configure("warning" if settings.log_level == "info" else settings.log_level, settings.log_format)
        serve = server()
        with incident(settings, prefix) as dead:
            remark(f"{dead} messages of {len(CAUSES)} causes are dead, in {own['database_url']}; queues {prefix}*")
            if not stopped:
                serve(settings, RoleName.ADMIN, as_json=as_json)


def _play(
    console: Console, options: Mapping[str, object], ttls: tuple[int, ...], stopped: Callable[[], bool]
) -> Result:
    from dlqbatch.demo.run import own_settings, perform

    prefix = f"demo-{secrets.token_hex(3)}-"
    with TemporaryDirectory(prefix="dlqbatch-demo-") as folder:
        settings = load({**options, **own_settings(prefix, Path(folder), ttls)}, secrets=fetch)
        settings = settings.model_copy(update={"event_delays": {}})  # it draws the tiers
        mask_secrets(settings)
        # A log line for every drain would hide the drawing.
        logs.configure("warning" if settings.log_level == "info" else settings.log_level, settings.log_format)
        trails = [Trail(part) for part in PARTS]
        delays = ", ".join(f"{ttl / 1000:g}" for ttl in ttls)
        console.print(f"{settings.broker_url}: queues named {prefix}*, delays of {delays} s\n")
        with drawing.drawing_on(console, trails) as picture:
            return perform(settings, prefix, trails, picture.show, stopped)
