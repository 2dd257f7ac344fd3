"""A secret of AWS Secrets Manager, read as a JSON object; what it holds is in no error and no log."""

from __future__ import annotations

import json
from typing import Any, Final

from dlqbatch.cloud import aws
from dlqbatch.errors import DlqbatchError, SettingsError

SECONDS: Final = 5.0
"""For one try; nothing of a run can begin before the answer is there."""
_ACTION: Final = "secretsmanager:GetSecretValue"
_NOT_ALLOWED: Final = f"Allow {_ACTION} on it, and kms:Decrypt on its key if it has one of its own"
_NO_LOGIN: Final = "Check the AWS credentials"
_TO_DO: Final = {
    "AccessDeniedException": _NOT_ALLOWED,
    "AccessDenied": _NOT_ALLOWED,
    "DecryptionFailure": "Allow kms:Decrypt on its key, and look whether the key is enabled",
    "ResourceNotFoundException": "Check dlqbatch.secret (DLQBATCH_SECRET), the account and the region (AWS_REGION)",
    "InvalidRequestException": "Look whether it is to be deleted, or has no value yet",
    "UnrecognizedClientException": _NO_LOGIN,
    "InvalidSignatureException": _NO_LOGIN,
    "ExpiredTokenException": _NO_LOGIN,
}
_ELSE: Final = (
    f"It takes the permission {_ACTION}, the right region, and a way to Secrets Manager (docs/aws-services.md)"
)


class SecretUnreadable(DlqbatchError):
    """AWS does not hand the secret out, or cannot be asked."""

    exit_code = 4

    def __init__(self, name: str, refused: aws.AwsRefused) -> None:
        self.name, self.code, self.may_pass = name, refused.code, refused.may_pass
        to_do = _TO_DO.get(refused.code, _ELSE)
        super().__init__(f"the secret '{name}' cannot be read: {refused.why} ({refused.code}). {to_do}.")


def fetch(name: str) -> dict[str, object]:
    """What the secret holds now, by key; SecretUnreadable, or SettingsError if it holds something else."""
    try:
        client = aws.client("secretsmanager", seconds=SECONDS, region=aws.region_of(name))
        with aws.asking(_ACTION):
            answer = client.get_secret_value(SecretId=name)
    except aws.AwsRefused as refused:
        raise SecretUnreadable(name, refused) from None
    found = _read(answer)
    if found is None:
        raise SettingsError(
            f"the secret '{name}' does not hold a JSON object; it must look like "
            '{"broker_url": "amqps://…", "database_url": "postgresql://…"}'
        )
    return found


def _read(answer: Any) -> dict[str, object] | None:
    # Their own errors hold the text that they cannot read.
    try:
        text = answer["SecretString"] if "SecretString" in answer else answer["SecretBinary"].decode()
        found = json.loads(text)
    except (ValueError, KeyError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
