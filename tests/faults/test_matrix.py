"""Of the faults of `scripts/faults` some of each kind, a round of each; the longer run makes all of them many times."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import pytest
from matrix.ground import Servers
from matrix.rounds import once

from scripts import services

if TYPE_CHECKING:
    from collections.abc import Iterator

SOME = (
    ("drain-killed-mid-publish", "classic"),
    ("drain-killed-unacked", "quorum"),
    ("drain-network-reset", "quorum"),
    ("drain-network-silent", "classic"),
    ("drain-alarm-ends", "quorum"),
    ("drain-source-declared-again", "classic"),
    ("drain-exchange-deleted", "quorum"),
    ("drain-target-full", "classic"),
    ("check-killed-confirmed", "classic"),
    ("ingest-killed-ack-unread", "quorum"),
    ("lifecycle-killed-unconfirmed", "quorum"),
    ("replay-killed-mid-publish", "classic"),
    ("ingesting-restarted-at-once", "postgresql"),
    ("canary-killed-at-a-commit", "postgresql"),
    ("retaining-killed-at-a-commit", "sqlite"),
    ("drain-default-exchange-killed-unacked", "classic"),
    ("drain-way-back-deleted", "classic"),
    ("ingest-republished-killed-unacked", "quorum"),
    ("monitor-killed-when-told", "sqlite"),
    ("replay-apply-killed", "postgresql"),
)


ROUNDS = 5


@pytest.fixture(scope="module")
def servers(broker_addresses: tuple[str, str]) -> Iterator[Servers]:
    with services.work_folder(volatile=True) as folder, Servers(folder, "3.10", broker_addresses) as found:
        yield found


@pytest.mark.parametrize(("name", "kind"), SOME)
def test_nothing_is_lost_changed_or_doubled_without_need(servers: Servers, name: str, kind: str) -> None:
    # A fault that comes too late has tested nothing: another one is made, and each has to be good.
    assert any(once(name, servers, kind, secrets.token_hex(4)).hits for _ in range(ROUNDS)), "it never struck"
