"""The receivers of alerts: a webhook, and an SNS topic; either may be slow, broken or gone.

`send` of a receiver returns None if the alerts were taken, and else why not, for a person. It raises nothing, and ends
within its time. The address of a webhook is a secret: neither it nor what the other side answers, which may repeat it,
is in any error or log.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any, Final
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit, urlunsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

import tenacity

from dlqbatch.aws import client as aws
from dlqbatch.errors import DlqbatchError
from dlqbatch.logs import plain
from dlqbatch.monitor.alert_rules import Notice
from dlqbatch.monitor.webhook_formats import Form, Message, lines_of, signature_headers, state_of
from dlqbatch.settings.urls import SecretAddress

# Seconds for all tries together.
TOTAL: Final = 10.0
# Seconds for one try of a webhook, and for one of AWS's own tries.
TIMEOUT: Final = 5.0
_AWS_TIMEOUT: Final = 3.0
TRIES: Final = 3
LONGEST_ANSWER: Final = 64 * 1024
LONGEST_SUBJECT: Final = 100
_LONGEST_TEXT: Final = 500
# With fewer seconds left than this, the pause before another try and the try itself are not worth beginning.
_LEAST: Final = 1.5
_PUBLISH: Final = "sns:Publish"
_REMEDIES: Final = {
    "AuthorizationError": f"; allow {_PUBLISH} on it, and kms:GenerateDataKey and kms:Decrypt on its key if it has one",
    "NotFound": "; check dlqbatch.alert_topic (DLQBATCH_ALERT_TOPIC)",
}


class NotTaken(Exception):
    """Why a receiver did not take the alerts."""

    def __init__(self, why: str, *, may_pass: bool = False) -> None:
        self.may_pass = may_pass
        super().__init__(why)


def _within(seconds: float, call: Callable[[], object]) -> None:
    """Make the call in a thread: neither a DNS lookup nor an answer that comes byte by byte has a time-out."""
    failures: list[NotTaken] = []
    done = threading.Event()

    def run() -> None:
        try:
            call()
        except NotTaken as error:
            failures.append(error)
        except Exception as error:  # noqa: BLE001  (its text may hold the address)
            failures.append(NotTaken(type(error).__name__))
        done.set()

    threading.Thread(target=run, daemon=True, name="receiver").start()
    if not done.wait(max(seconds, 0.1)):
        raise NotTaken(f"no answer within {seconds:.3g} s", may_pass=True)
    if failures:
        raise failures[0]


# --- A webhook: a chat, or any other program that takes JSON over HTTP


class Webhook:
    def __init__(
        self,
        url: str,
        timeout: float = TIMEOUT,
        total: float = TOTAL,
        *,
        form: Form | None = None,
        secret: str | None = None,
    ) -> None:
        """With a secret each message is signed."""
        self._form, self._secret = form or Form(), secret
        parts = urlsplit(url)
        self._shown = str(SecretAddress(url))
        self._url = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, parts.query, ""))
        self._headers = {"Content-Type": "application/json; charset=utf-8", "User-Agent": "dlqbatch"}
        if parts.username is not None:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            self._headers["Authorization"] = f"Basic {base64.b64encode(login).decode()}"
        self._timeout, self._total = timeout, total

    def send(self, notices: Sequence[Notice]) -> str | None:
        ends = time.monotonic() + self._total
        try:
            for message in self._form.messages(notices):
                self._send_one(message, ends)
        except NotTaken as error:
            return f"the webhook at {self._shown} was not told: {error}"
        return None

    def _send_one(self, message: Message, ends: float) -> None:
        tries = tenacity.Retrying(
            stop=lambda state: state.attempt_number >= TRIES or time.monotonic() + _LEAST > ends,
            wait=tenacity.wait_exponential(multiplier=0.2, max=1),
            retry=tenacity.retry_if_exception(lambda error: isinstance(error, NotTaken) and error.may_pass),
            reraise=True,
        )

        def post_in_time() -> None:
            seconds = min(self._timeout, ends - time.monotonic())
            _within(seconds, lambda: self._post(message, seconds))

        tries(post_in_time)

    def _post(self, message: Message, seconds: float) -> None:
        signed = {} if self._secret is None else signature_headers(self._secret, message, int(time.time()))
        # The settings allow only HTTP.
        request = Request(self._url, message.body, self._headers | signed, method="POST")  # noqa: S310
        try:
            with build_opener(_NoRedirects).open(request, timeout=seconds) as answer:
                answer.read(LONGEST_ANSWER)
        except HTTPError as error:
            error.close()
            may_pass = error.code == HTTPStatus.TOO_MANY_REQUESTS or error.code >= HTTPStatus.INTERNAL_SERVER_ERROR
            raise NotTaken(_status(error.code), may_pass=may_pass) from None
        except (URLError, OSError, http.client.HTTPException) as error:
            raise NotTaken(_why(error), may_pass=True) from None


class _NoRedirects(HTTPRedirectHandler):
    """An alert goes to the address that was set and nowhere else; after a redirect it would be no POST any more."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _status(status: int) -> str:
    phrase = f" {HTTPStatus(status).phrase}" if status in set(HTTPStatus) else ""
    if HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST:
        return f"it answered {status}{phrase}; a redirect is not followed, set the address that it leads to"
    return f"it answered {status}{phrase}"


def _why(error: BaseException) -> str:
    reason = error.reason if isinstance(error, URLError) else error
    if isinstance(reason, TimeoutError):
        return "no answer in time"
    if isinstance(reason, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({reason.verify_message})"
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    return type(reason).__name__


# --- An SNS topic, and from there mail, a chat, a queue or another function


def subject(notices: Sequence[Notice]) -> str:
    """One line of ASCII, as SNS demands it; it is the subject of a mail."""
    first, more = notices[0], len(notices) - 1
    text = f"dlqbatch: {first.name} ({state_of(first)})" + (f" and {more:,} more" if more else "")
    return plain(text).encode("ascii", "replace").decode()[:LONGEST_SUBJECT]


def message(notices: Sequence[Notice]) -> str:
    return "\n".join(lines_of(notices, _plain_line))


def _plain_line(notice: Notice, before: str) -> str:
    return f"{notice.name} ({state_of(notice)}): {before}{plain(notice.summary, _LONGEST_TEXT)}"


def attributes(notices: Sequence[Notice]) -> dict[str, dict[str, str]]:
    """Lists of words, of which the filter policy of a subscription matches any: {"severity": ["critical"]}."""
    words = {
        "severity": {notice.severity.value for notice in notices},
        "state": {notice.state for notice in notices},
        "alert": {notice.name for notice in notices},
    }
    return {
        name: {"DataType": "String.Array", "StringValue": json.dumps(sorted(found))} for name, found in words.items()
    }


class Topic:
    def __init__(self, arn: str, total: float = TOTAL) -> None:
        self._arn, self._total = arn, total

    def send(self, notices: Sequence[Notice]) -> str | None:
        try:
            _within(self._total, lambda: self._publish(notices))
        except NotTaken as error:
            return f"the topic {self._arn} was not told: {error}"
        return None

    def _publish(self, notices: Sequence[Notice]) -> None:
        try:
            client = aws.client("sns", seconds=min(_AWS_TIMEOUT, self._total), region=aws.region_of(self._arn))
            with aws.asking(_PUBLISH):
                client.publish(
                    TopicArn=self._arn,
                    Subject=subject(notices),
                    Message=message(notices),
                    MessageAttributes=attributes(notices),
                )
        except aws.AwsRefused as error:
            raise NotTaken(f"{error}{_REMEDIES.get(error.code, '')}") from None
        except DlqbatchError as error:
            raise NotTaken(str(error)) from None
