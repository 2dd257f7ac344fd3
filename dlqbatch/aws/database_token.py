"""The password of a database of Amazon RDS whose user logs in by IAM: a token, signed here and good for 15 minutes."""

from __future__ import annotations

from functools import cache
from typing import Any

from dlqbatch.aws import client as aws


def token(host: str, port: int, user: str) -> str:
    """Signed for these three, with the credentials of this moment; nothing is asked of RDS."""
    with aws.asking("rds-db:connect"):
        made: str = _client().generate_db_auth_token(DBHostname=host, Port=port, DBUsername=user)
    return made


@cache
def _client() -> Any:
    return aws.client("rds")
