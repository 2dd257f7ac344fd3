"""A password that was read is masked wherever a library repeats it, address or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dlqbatch import logs
from dlqbatch.settings import load, secrets_of

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def nothing_hidden() -> Iterator[None]:
    yield
    logs._hidden.clear()


def test_every_password_of_the_settings_is_hidden_as_written_and_as_sent() -> None:
    settings = load(
        {
            "broker_url": "amqp://u:first%40secret@h/,amqp://u:second-secret@i/",
            "database_url": "postgresql://u:third%2Fsecret@h/x?sslpassword=fourth-secret",
            "management_url": "http://u:fifth-secret@h",
            "webhook_url": "https://hooks.example/T0/sixth-secret?key=seventh-secret",
        },
        {"DLQBATCH_CONFIG": "/dev/null"},
    )
    logs.hide(secrets_of(settings))
    for secret in ("first%40secret", "first@secret", "second-secret", "third/secret", "fourth-secret", "fifth-secret"):
        assert logs.masked(f"a library says {secret} here") == "a library says *** here"
    assert "secret" not in logs.masked("POST /T0/sixth-secret?key=seventh-secret failed")


def test_a_password_as_short_as_a_word_does_not_take_every_line_along() -> None:
    logs.hide(["guest", ""])
    assert logs.masked("the user guest may not log in") == "the user guest may not log in"
