"""Options of what a run uses of AWS."""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import AfterValidator

from dlqbatch.settings.values import Options, option

_SECRET: Final = re.compile(r"[A-Za-z0-9/_+=.@:!-]{1,2048}")
_TOPIC: Final = re.compile(r"arn:aws[a-z-]*:sns:[a-z0-9-]+:\d{12}:[A-Za-z0-9_-]{1,256}")
_NAMESPACE: Final = re.compile(r"[A-Za-z0-9._/#:-]{1,255}")


def secret_name(value: str) -> str:
    if not _SECRET.fullmatch(value):
        raise ValueError("is neither the name nor the ARN of a secret")
    return value


def topic_arn(value: str) -> str:
    if not _TOPIC.fullmatch(value):
        raise ValueError("is not the ARN of an SNS topic, such as arn:aws:sns:eu-central-1:123456789012:dlqbatch")
    return value


def namespace(value: str) -> str:
    if not _NAMESPACE.fullmatch(value) or value.startswith("AWS/"):
        raise ValueError("is no namespace of CloudWatch: 1 to 255 letters, digits or any of . - _ / # :, not AWS/…")
    return value


class CloudOptions(Options):
    """Part of `Settings`."""

    secret: Annotated[str, AfterValidator(secret_name)] | None = option(
        None,
        "The AWS Secrets Manager secret that holds addresses: a JSON object with broker_url, database_url, "
        "management_url or webhook_url. What the command line or the environment says goes before it.",
        "the name or the ARN of a secret",
    )
    database_secret: Annotated[str, AfterValidator(secret_name)] | None = option(
        None,
        "The AWS Secrets Manager secret that RDS makes and rotates for a user of the database: a JSON object with "
        "username and password, which take the place of those in database_url. What else it holds is not read.",
        "the name or the ARN of a secret",
    )
    alert_topic: Annotated[str, AfterValidator(topic_arn)] | None = option(
        None, "The SNS topic to which alerts are published.", "the ARN of an SNS topic"
    )
    metrics_namespace: Annotated[str, AfterValidator(namespace)] | None = option(
        None,
        "The CloudWatch namespace of the metrics that a run on AWS Lambda prints in the embedded metric format.",
        "1 to 255 letters, digits or any of . - _ / # :",
    )
