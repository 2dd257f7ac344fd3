"""A diagnosis of a test's own virtual host, by code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlqbatch.doctor.job import diagnose
from dlqbatch.settings import load

if TYPE_CHECKING:
    from dlqbatch.doctor.findings import Code, Finding
    from scripts.servers.management import Management


class Patient:
    def __init__(self, broker_url: str, management: Management, database_url: str) -> None:
        host, port = management._address
        self.settings: dict[str, object] = {
            "broker_url": broker_url,
            "management_url": f"http://{host}:{port}",
            "database_url": database_url,
            "connect_timeout_seconds": 60,
        }

    def findings(self, **options: object) -> tuple[Finding, ...]:
        return diagnose(load(self.settings | options, {"DLQBATCH_CONFIG": "/dev/null"})).findings

    def found(self, code: Code, **options: object) -> dict[str, Finding]:
        """Of one kind, by where."""
        return {one.where: one for one in self.findings(**options) if one.code is code}
