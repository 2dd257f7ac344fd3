"""The secret of AWS Secrets Manager that the settings name: a JSON object, whose content is in no error and no log.

A process asks for it once, and again when it may have changed. A warm function and `dlqbatch schedule` live through a
rotation: whoever is refused a login calls `stale`, and the next `fetch` asks again. What changes without a refusal,
such as the address of a webhook, is known after MOST_AGE.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from dlqbatch import logs
from dlqbatch.errors import DlqbatchError, SettingsError

if TYPE_CHECKING:
    from dlqbatch.aws.client import AwsRefused  # a drain without a secret loads no client
    from dlqbatch.settings import Settings

log = logs.get(__name__)

# Seconds for one try; nothing of a run can begin before the answer is there.
SECONDS: Final = 5.0
# Seconds; a run a minute then asks 96 times a day, which costs about a cent a month.
MOST_AGE: Final = 15 * 60.0
# Seconds before the next request after one without an answer.
_SOON: Final = 60.0
_CONNECTED_TO: Final = ("broker_url", "database_url", "management_url")
_ACTION: Final = "secretsmanager:GetSecretValue"
_NOT_ALLOWED: Final = f"Allow {_ACTION} on it, and kms:Decrypt on its key if it has one of its own"
_NO_LOGIN: Final = "Check the AWS credentials"
_REMEDIES: Final = {
    "AccessDeniedException": _NOT_ALLOWED,
    "AccessDenied": _NOT_ALLOWED,
    "DecryptionFailure": "Allow kms:Decrypt on its key, and look whether the key is enabled",
    "ResourceNotFoundException": "Check dlqbatch.secret (DLQBATCH_SECRET), the account and the region (AWS_REGION)",
    "InvalidRequestException": "Look whether it is to be deleted, or has no value yet",
    "UnrecognizedClientException": _NO_LOGIN,
    "InvalidSignatureException": _NO_LOGIN,
    "ExpiredTokenException": _NO_LOGIN,
}
_ELSE: Final = f"It takes the permission {_ACTION}, the right region, and a way to Secrets Manager (docs/aws.md)"


class SecretUnreadable(DlqbatchError):
    """AWS refuses to return the secret, or does not answer."""

    exit_code = 4

    def __init__(self, name: str, refused: AwsRefused) -> None:
        self.name, self.code, self.may_pass = name, refused.code, refused.may_pass
        remedy = _REMEDIES.get(refused.code, _ELSE)
        super().__init__(f"the secret '{name}' cannot be read: {refused.why} ({refused.code}). {remedy}.")


class _Known(NamedTuple):
    values: Mapping[str, object]
    until: float


_known: dict[str, _Known] = {}
_prepared: dict[str, Any] = {}
_one_asks = threading.Lock()


def fetch(name: str) -> Mapping[str, object]:
    """What the secret holds, as this process knows it; SecretUnreadable, or SettingsError if it is no JSON object."""
    with _one_asks:
        known = _known.get(name)
        if known is None or time.monotonic() >= known.until:
            known = _known[name] = _ask(name, known)
        return known.values


def prepare(name: str) -> None:
    """Make the client for the first `fetch` of this secret, which takes longer than the question itself."""
    from dlqbatch.aws import client as aws  # noqa: PLC0415  (only for those who have a secret)

    _prepared[name] = aws.client("secretsmanager", seconds=SECONDS, region=aws.region_of(name))


def stale(*names: str) -> None:
    """Let the next `fetch` of them ask AWS."""
    with _one_asks:
        for name in names:
            known = _known.get(name)
            if known is not None:
                _known[name] = _Known(known.values, time.monotonic())


def named(settings: Settings) -> tuple[str, ...]:
    """The secrets that these settings come from."""
    return tuple(name for name in (settings.secret, settings.database_secret) if name is not None)


def _ask(name: str, known: _Known | None) -> _Known:
    try:
        return _Known(_read(name), time.monotonic() + MOST_AGE)
    except SecretUnreadable as error:
        # What was right a quarter of an hour ago most likely still is: a bad minute of AWS stops no run.
        if known is None or not error.may_pass:
            raise
        log.warning("the secret could not be asked for again, so the run goes on with what is known", why=str(error))
        return _Known(known.values, time.monotonic() + _SOON)


def _read(name: str) -> Mapping[str, object]:
    from dlqbatch.aws import client as aws  # noqa: PLC0415  (only for those who have a secret)

    try:
        if name not in _prepared:
            prepare(name)
        client = _prepared.pop(name)
        with aws.asking(_ACTION):
            answer: Any = client.get_secret_value(SecretId=name)
    except aws.AwsRefused as refused:
        raise SecretUnreadable(name, refused) from None
    held = None
    with suppress(ValueError, KeyError, RecursionError):  # these errors have the text in them
        held = json.loads(answer["SecretString"] if "SecretString" in answer else answer["SecretBinary"].decode())
    if not isinstance(held, dict):
        raise SettingsError(
            f"the secret '{name}' does not hold a JSON object; it must look like "
            '{"broker_url": "amqps://…", "database_url": "postgresql://…"}'
        )
    return held


def renewed(settings: Settings, read_again: Callable[[], Settings] | None, refused: DlqbatchError) -> Settings:
    """The settings with which a refused run is worth repeating; `refused` is raised if there are none."""
    again = _read_again(settings, read_again)
    if again is None:
        raise refused
    log.warning("the secret has changed: the run is repeated", secret=" ".join(named(settings)), why=str(refused))
    return again


def _read_again(settings: Settings, read_again: Callable[[], Settings] | None) -> Settings | None:
    """The settings with the secret as it is now; None if it names the addresses that these settings have."""
    names = named(settings)
    if not names or read_again is None:
        return None
    stale(*names)
    try:
        again = read_again()
    except DlqbatchError as error:
        log.warning("the secret could not be read again, so it is not known whether it has changed", why=str(error))
        return None
    is_same = all(getattr(again, option) == getattr(settings, option) for option in _CONNECTED_TO)
    return None if is_same else again


class CurrentSettings:
    """The settings of a process that lives through rotations; may be used from several threads."""

    def __init__(self, settings: Settings, read_again: Callable[[], Settings] | None) -> None:
        self.settings = settings
        self._read_again = read_again
        self._lock = threading.Lock()
        self._not_before = 0.0

    def renew(self, used: Settings) -> bool:
        """Whether there are other settings to try, after something could not be reached with `used`."""
        with self._lock:
            if self.settings is not used:
                return True  # another thread has asked meanwhile
            if time.monotonic() < self._not_before:
                return False
            self._not_before = time.monotonic() + _SOON
            self.settings = _read_again(used, self._read_again) or used
            return self.settings is not used
