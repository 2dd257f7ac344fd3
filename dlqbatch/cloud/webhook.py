"""Alerts to a chat or any other program that takes JSON over HTTP; it may be slow, broken or gone.

The address is a secret: neither it nor what the other side answers, which may repeat it, is in any error or log.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import threading
import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit, urlunsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlqbatch.policy.alerts import Notice

TIMEOUT: Final = 5.0
TOTAL: Final = 10.0
TRIES: Final = 3
"""Time-outs in seconds, of one try and of them all."""
SHOWN: Final = 20
"""So many alerts are told in full; of the rest, the number."""
LONGEST_ANSWER: Final = 64 * 1024
_LEAST: Final = 1.5
"""Seconds, without which another try is not worth beginning: the pause before it, and a little for the call."""
_LONGEST_TEXT: Final = 500
_MARKS: Final = {"fired": {"critical": ":rotating_light:", "warning": ":warning:"}}
_RESOLVED: Final = ":white_check_mark:"


class NotTold(Exception):
    """Why the other side did not take it."""

    def __init__(self, why: str, *, may_pass: bool) -> None:
        self.may_pass = may_pass
        super().__init__(why)


def payload(notices: Sequence[Notice]) -> dict[str, object]:
    """`text` and `blocks` are for Slack and what understands it; `source`, `alerts` and `more` for programs."""
    shown, more = notices[:SHOWN], max(len(notices) - SHOWN, 0)
    lines = [_line(notice) for notice in shown]
    if more:
        lines.append(f"… and {more:,} more. Look: dlqbatch status")
    return {
        "text": "\n".join(lines),
        "blocks": [{"type": "section", "text": {"type": "mrkdwn", "text": line}} for line in lines],
        "source": "dlqbatch",
        "alerts": [notice.as_dict() for notice in shown],
        "more": more,
    }


def _line(notice: Notice) -> str:
    mark = _MARKS["fired"][notice.severity.value] if notice.state == "fired" else _RESOLVED
    state = notice.severity.value if notice.state == "fired" else "resolved"
    was = "" if notice.state == "fired" else "it was: "
    return f"{mark} *{notice.name}* ({state}): {was}{escaped(notice.summary[:_LONGEST_TEXT])}"


def escaped(text: str) -> str:
    """Slack takes these three for the beginning of links, mentions and entities."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


class Webhook:
    def __init__(self, url: str, timeout: float = TIMEOUT, total: float = TOTAL) -> None:
        parts = urlsplit(url)
        name = parts.hostname or ""
        self._host = f"{parts.scheme}://{name}/***"
        place = parts.netloc.rpartition("@")[2]
        self._url = urlunsplit((parts.scheme, place, parts.path, parts.query, ""))
        self._headers = {"Content-Type": "application/json; charset=utf-8", "User-Agent": "dlqbatch"}
        if parts.username is not None:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            self._headers["Authorization"] = f"Basic {base64.b64encode(login).decode()}"
        self._timeout, self._total = timeout, total

    def tell(self, notices: Sequence[Notice]) -> str | None:
        """None if they were taken; else why not, for a person. It never raises, and always ends."""
        import tenacity  # noqa: PLC0415  (only for those who have something to tell)

        ends = time.monotonic() + self._total
        body = json.dumps(payload(notices)).encode()
        try:
            trying = tenacity.Retrying(
                stop=lambda state: state.attempt_number >= TRIES or time.monotonic() + _LEAST > ends,
                wait=tenacity.wait_exponential(multiplier=0.2, max=1),
                retry=tenacity.retry_if_exception(lambda error: isinstance(error, NotTold) and error.may_pass),
            )
            trying(lambda: self._in_time(body, min(self._timeout, ends - time.monotonic())))
        except tenacity.RetryError as error:
            return f"the webhook at {self._host} was not told: {error.last_attempt.exception()}"
        except NotTold as error:
            return f"the webhook at {self._host} was not told: {error}"
        return None

    def _in_time(self, body: bytes, seconds: float) -> None:
        """In a thread of its own: looking up a name, or a server that sends byte after byte, knows no time-out."""
        failure: list[NotTold] = []
        done = threading.Event()

        def post() -> None:
            try:
                self._post(body, seconds)
            except NotTold as error:
                failure.append(error)
            except Exception as error:  # noqa: BLE001  (its text may hold the address)
                failure.append(NotTold(type(error).__name__, may_pass=False))
            done.set()

        threading.Thread(target=post, daemon=True, name="webhook").start()
        if not done.wait(max(seconds, 0.1)):
            raise NotTold(f"no answer within {seconds:.3g} s", may_pass=True)
        if failure:
            raise failure[0]

    def _post(self, body: bytes, seconds: float) -> None:
        request = Request(self._url, body, self._headers, method="POST")  # noqa: S310  (the settings allow only HTTP)
        try:
            with build_opener(_Stay).open(request, timeout=seconds) as answer:
                answer.read(LONGEST_ANSWER)
        except HTTPError as error:
            error.close()
            raise NotTold(_status(error.code), may_pass=_may_pass(error.code)) from None
        except (URLError, OSError, http.client.HTTPException) as error:
            raise NotTold(_why(error), may_pass=True) from None


class _Stay(HTTPRedirectHandler):
    """An alert goes to the address that was set and nowhere else; and after a redirect it would be no POST any more."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _may_pass(status: int) -> bool:
    return status == HTTPStatus.TOO_MANY_REQUESTS or status >= HTTPStatus.INTERNAL_SERVER_ERROR


def _status(status: int) -> str:
    try:
        phrase = f" {HTTPStatus(status).phrase}"
    except ValueError:
        phrase = ""
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
