"""The broker's management API: the one client for what AMQP cannot tell."""

from __future__ import annotations

import base64
import json
import re
import time
from contextlib import suppress
from functools import cached_property
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.error import HTTPError
from urllib.parse import quote, unquote, urlsplit
from urllib.request import HTTPRedirectHandler, HTTPSHandler, OpenerDirector, Request, build_opener

from dlqbatch.broker import trust
from dlqbatch.errors import BrokerUnreachable, SettingsError
from dlqbatch.message.table import LONGEST_NAME

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PAGE: Final = 500
"""Queues in one answer; the API gives no more."""
MOST_PAGES: Final = 1000
_TIMEOUT: Final = 15.0
_LONGEST_ERROR: Final = 64 * 1024
_LONGEST_ANSWER: Final = 64 * 1024 * 1024
_PIECE: Final = 64 * 1024
_LONGEST_SECONDS: Final = 60.0
"""A time-out ends silence; these two end an answer that never does."""
_BAD_REQUEST: Final = 400
_SHOWN: Final = 60
"""Characters of a name that is none."""
_NO_PAGES: Final = "wildcards need the management API (management_url), names do not"


class NoReply(BrokerUnreachable):
    """The management API did not answer with what was asked for; with a code if it answered at all."""

    def __init__(
        self, where: str, why: str, code: int | None = None, content: bytes = b"", date: str | None = None
    ) -> None:
        self.code, self.content, self.date = code, content, date
        super().__init__(where, why)


class Answer(NamedTuple):
    content: Any
    date: str | None
    """The broker's clock, as its header tells it."""


class _NoRedirects(HTTPRedirectHandler):
    """A redirect would take the password to wherever the answer says."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class Api:
    """Where it is, who asks, and how its https address is trusted: as the broker's is."""

    def __init__(
        self,
        broker_url: str,
        management_url: str | None,
        *,
        tls_ca_file: str | None = None,
        tls_cert_file: str | None = None,
        tls_key_file: str | None = None,
        tls_verify: bool = True,
    ) -> None:
        broker = urlsplit(broker_url)
        own = urlsplit(management_url) if management_url else broker
        self.user = unquote(broker.username or "guest")
        """Whom the broker knows us as; the API may know another."""
        self.vhost = unquote(broker.path[1:]) or "/"
        user = unquote(own.username or broker.username or "guest")
        password = unquote(own.password or broker.password or "guest")
        self._token = base64.b64encode(f"{user}:{password}".encode()).decode()
        if management_url:
            self.address = f"{own.scheme}://{own.netloc.rpartition('@')[2]}{own.path.rstrip('/')}"
        else:
            host = f"[{broker.hostname}]" if ":" in (broker.hostname or "") else broker.hostname
            self.address = f"https://{host}:15671" if broker.scheme == "amqps" else f"http://{host}:15672"
        self._tls_files = tls_ca_file, tls_cert_file, tls_key_file
        self._tls_verify = tls_verify

    def ask(self, *path: str, query: str = "") -> Answer:
        """Its answer to a path given in parts, which are quoted here; NoReply if there is none."""
        place = "/".join(quote(part, safe="") for part in path)
        where = f"{self.address}/api/{place}"
        if not where.startswith(("http://", "https://")):
            raise SettingsError("the management address must begin with http:// or https://")
        headers = {"Authorization": f"Basic {self._token}"}
        request = Request(f"{where}?{query}" if query else where, headers=headers)  # noqa: S310  (checked above)
        try:
            with self._opener.open(request, timeout=_TIMEOUT) as response:
                return Answer(json.loads(_whole(response)), response.headers.get("Date"))
        except HTTPError as error:
            content = b""
            with error, suppress(OSError, HTTPException):  # the code has said it; the text may be cut
                content = error.read(_LONGEST_ERROR)
            why = f"the management API answers {error.code} {error.reason}"
            raise NoReply(where, why, error.code, content, error.headers.get("Date")) from error
        except (OSError, ValueError, RecursionError, HTTPException) as error:
            why = f"the management API does not answer: {getattr(error, 'reason', None) or error}"
            raise NoReply(where, why) from error

    @cached_property
    def _opener(self) -> OpenerDirector:
        if not self.address.startswith("https://"):
            return build_opener(_NoRedirects)
        return build_opener(
            _NoRedirects, HTTPSHandler(context=trust.context(*self._tls_files, verify=self._tls_verify))
        )


def _whole(response: Any) -> bytes:
    """What somebody else answers: an end to its size and to its time, whoever it is."""
    ends, parts, size = time.monotonic() + _LONGEST_SECONDS, list[bytes](), 0
    while piece := response.read1(_PIECE):
        parts.append(piece)
        size += len(piece)
        if size > _LONGEST_ANSWER:
            raise ValueError(f"the answer is longer than {_LONGEST_ANSWER:,} bytes")
        if time.monotonic() > ends:
            raise TimeoutError(f"the answer takes longer than {_LONGEST_SECONDS:g} s")
    return b"".join(parts)


class Expansion(NamedTuple):
    queues: tuple[str, ...]
    """Each once: the names as they stood, then what the wildcards match."""
    unmatched: tuple[str, ...]
    """Wildcards that match no queue."""
    left_out: tuple[str, ...]
    """What wildcards match and nothing can be taken from: a sentence for each."""


def expansion(names: Iterable[str], api: Api) -> Expansion:
    """Names as they stand, wildcards (`*`) as the queues they match; only wildcards need the API."""
    found: dict[str, None] = {}
    wildcards: dict[str, re.Pattern[str]] = {}
    for name in names:
        if "*" in name:
            wildcards[name] = re.compile(".*".join(re.escape(part) for part in name.split("*")), re.DOTALL)
        else:
            found[name] = None
    unmatched = dict.fromkeys(wildcards)
    left_out: dict[str, None] = {}
    if wildcards:
        for queue, is_stream in sorted(_queues(api)):
            matching = [name for name, wildcard in wildcards.items() if wildcard.fullmatch(queue)]
            for name in matching:
                unmatched.pop(name, None)
            if not matching or queue in found:
                continue
            if why := _why_not(queue, is_stream=is_stream):
                left_out[why] = None
            else:
                found[queue] = None
    return Expansion(tuple(found), tuple(unmatched), tuple(left_out))


def _why_not(queue: str, *, is_stream: bool) -> str:
    """Why it is left out: to ask for what AMQP cannot carry would end the run, and so would a get from a stream."""
    try:
        size = len(queue.encode())
    except UnicodeEncodeError:
        size = 0
    if not 1 <= size <= LONGEST_NAME:
        return (
            f"'{ascii(queue[:_SHOWN])[1:-1]}' is left out: the management API names it, but no queue can be called so"
        )
    return f"'{queue}' is a stream and is left out" if is_stream else ""


def _queues(api: Api) -> Iterator[tuple[str, bool]]:
    """The names of those that are not exclusive, and whether it is a stream."""
    columns = "name,exclusive,type"
    for page in range(1, MOST_PAGES + 1):
        try:
            answer = api.ask("queues", api.vhost, query=f"page={page}&page_size={PAGE}&columns={columns}").content
        except NoReply as silence:
            if page > 1 and silence.code == _BAD_REQUEST and b"page_out_of_range" in silence.content:
                return  # queues were deleted since the page before
            if silence.code is None:
                raise BrokerUnreachable(silence.where, f"{silence.why}; {_NO_PAGES}") from silence
            raise
        if not _is_page(answer):
            raise BrokerUnreachable(f"{api.address}/api/queues", "the answer is not a list of queues")
        # An exclusive queue is closed to everybody but its owner: to ask for it would end the run.
        for item in answer["items"]:
            if not item.get("exclusive"):
                yield item["name"], item.get("type") == "stream"
        if page >= answer["page_count"]:
            return


def _is_page(answer: Any) -> bool:
    return (
        isinstance(answer, dict)
        and isinstance(answer.get("page_count"), int)
        and isinstance(answer.get("items"), list)
        and all(isinstance(item, dict) and isinstance(item.get("name"), str) for item in answer["items"])
    )
