"""How AWS is reached: one kind of client, and one error for whatever AWS or the network answers.

    s3 = aws.client("s3")
    with aws.asking("s3:PutObject"):
        s3.put_object(…)

Credentials, region and endpoint are found where AWS documents it: environment, profile, role. boto3 does not know
AWS_REGION, which Lambda sets and AWS's own command line reads; here it goes before AWS_DEFAULT_REGION.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Final

from dlqbatch import logs
from dlqbatch.errors import DlqbatchError, SettingsError

# Seconds without a byte after which a call is given up.
SECONDS: Final = 10.0
# In a VPC without a way to AWS nothing answers at all, which is better reported early than when the run is over.
CONNECT_SECONDS: Final = 3.0
TRIES: Final = 3
INSTALL: Final = "pip install 'dlqbatch[aws]', or in a checkout: pip install -r requirements-aws.txt"
_LONGEST_WHY: Final = 300
_REGION_PART: Final = 3

# Texts that replace boto3's own, which may hold addresses with passwords.
_WORDS: Final = {
    "NoCredentialsError": "no AWS credentials were found; give the function a role, or set AWS_PROFILE",
    "PartialCredentialsError": "the AWS credentials are incomplete; both the key and its secret are needed",
    "CredentialRetrievalError": "the AWS credentials could not be got from where AWS_PROFILE says",
    "ProfileNotFound": "there is no AWS profile of the name that AWS_PROFILE says",
    "NoRegionError": "no AWS region is set; set AWS_REGION",
    "InvalidRegionError": "AWS_REGION holds no valid region",
    "EndpointConnectionError": "no connection to its endpoint; is there a way to it, such as a VPC endpoint or a NAT?",
    "ConnectTimeoutError": "its endpoint does not answer; is there a way to it, such as a VPC endpoint or a NAT?",
    "ReadTimeoutError": "no answer in time",
    "ConnectionClosedError": "the connection was closed before the answer",
    "ProxyConnectionError": "no connection to the proxy that HTTPS_PROXY says",
    "SSLError": "its certificate is not trusted; AWS_CA_BUNDLE can name the certificates of a proxy",
    "TokenRetrievalError": "the AWS login has expired; log in again",
    "UnauthorizedSSOTokenError": "the AWS login has expired; log in again",
    "SSOTokenLoadError": "there is no AWS login; log in first",
}
_MAY_PASS: Final = frozenset(
    {"EndpointConnectionError", "ConnectTimeoutError", "ReadTimeoutError", "ConnectionClosedError"}
)


class AwsRefused(DlqbatchError):
    """A refusal of AWS, or no answer; `code` is AWS's own, or the name of boto3's error."""

    exit_code = 4

    def __init__(self, action: str, code: str, why: str, *, status: int | None = None, may_pass: bool = False) -> None:
        self.action, self.code, self.why = action, code, why
        self.status = status
        """The status of HTTP; None if there was no answer."""
        self.may_pass = may_pass
        """Whether the same call may succeed in a while."""
        super().__init__(f"{action} failed: {why} ({code})")


def client(service: str, *, seconds: float = SECONDS, region: str | None = None) -> Any:
    """A new client that gives up after `seconds` without a byte, and tries three times at most.

    `region` is for a resource whose ARN names one; None is the region that is set.
    """
    try:
        import boto3  # noqa: PLC0415  (large, and only for those who use AWS)
        from botocore.config import Config  # noqa: PLC0415  (it comes with boto3)
        from botocore.exceptions import NoRegionError  # noqa: PLC0415  (it comes with boto3)
    except ImportError:
        raise SettingsError(f"{service} needs boto3, which is not installed: {INSTALL}") from None
    config = Config(
        connect_timeout=min(seconds, CONNECT_SECONDS),
        read_timeout=seconds,
        retries={"mode": "standard", "total_max_attempts": TRIES},
        user_agent_extra="dlqbatch",
    )
    with asking(f"opening {service}"):
        # boto3's default session is not made for threads.
        session = boto3.session.Session(region_name=region or os.environ.get("AWS_REGION", "").strip() or None)
        if session.region_name is not None and not session.region_name.strip():
            # boto3 would make an address of an AWS_DEFAULT_REGION that is set to nothing.
            raise NoRegionError
        return session.client(service, config=config)


def region_of(arn: str) -> str | None:
    """The region that an ARN names; None for any other name."""
    parts = arn.split(":")
    return parts[3] or None if parts[0] == "arn" and len(parts) > _REGION_PART else None


@contextmanager
def asking(action: str) -> Iterator[None]:
    """Raise an error of boto3 as AwsRefused; `action` is the name of the permission, such as s3:PutObject."""
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415  (loaded by whoever has a client)

    try:
        yield
    except ClientError as error:
        raise _answered(action, error.response) from None
    except (BotoCoreError, ValueError) as error:  # a ValueError is an endpoint that is no address
        code = type(error).__name__
        why = _WORDS.get(code, "boto3 could not ask")
        raise AwsRefused(action, code, why, may_pass=code in _MAY_PASS) from None


def _answered(action: str, response: Any) -> AwsRefused:
    said = response.get("Error", {})
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    # Behind the first line, AWS repeats a request whose signature is wrong, with the session token in it.
    lines = str(said.get("Message", "")).strip().splitlines() or ["AWS gave no reason"]
    why = logs.plain(logs.masked(lines[0]), _LONGEST_WHY).rstrip(". ")
    is_busy = status is not None and (
        status >= HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.TOO_MANY_REQUESTS
    )
    code = logs.plain(str(said.get("Code", "unknown")), _LONGEST_WHY)
    return AwsRefused(action, code, why, status=status, may_pass=is_busy or "Throttl" in code)
