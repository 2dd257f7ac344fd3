"""The broker's management API: its client, queues by wildcards, and a client with a time limit for a whole run."""

from __future__ import annotations

import base64
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, wraps
from http.client import HTTPException
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, TypeVar
from urllib.error import HTTPError
from urllib.parse import quote, unquote, urlsplit
from urllib.request import HTTPRedirectHandler, HTTPSHandler, OpenerDirector, Request, build_opener

from dlqbatch import logs
from dlqbatch.amqp.patterns import is_wildcard, pattern
from dlqbatch.amqp.table import LONGEST_NAME
from dlqbatch.broker.access import tls_context, token_in, vhost_of
from dlqbatch.broker.connection import Connection
from dlqbatch.broker.refusals import NOT_FOUND
from dlqbatch.errors import BrokerUnreachable, SettingsError

_log = logs.get(__name__)

PAGE: Final = 500
"""Queues in one answer; the API gives no more."""
MOST_PAGES: Final = 1000
ANSWERS_WITHIN: Final = 15.0
QUICKLY: Final = 3.0
"""Seconds that a run waits for an answer that it can do without."""
_LONGEST_ERROR: Final = 64 * 1024
_LONGEST_ANSWER: Final = 64 * 1024 * 1024
_PIECE: Final = 64 * 1024
# A time-out ends failure; this and the largest size end an answer that never does.
_LONGEST_SECONDS: Final = 60.0
_BAD_REQUEST: Final = 400
_TYPES: Final = ("classic", "quorum")
_SHOWN: Final = 60
"""Characters of a name that is none."""
_NO_PAGES: Final = "wildcards need the management API (management_url), names do not"


class NoReply(BrokerUnreachable):
    """The management API did not answer the request; `code` is None if it did not answer at all."""

    def __init__(
        self, where: str, why: str, code: int | None = None, content: bytes = b"", date: str | None = None
    ) -> None:
        self.code, self.content, self.date = code, content, date
        super().__init__(where, why)


class Answer(NamedTuple):
    content: Any
    date: str | None
    """The broker's clock, by the header of the answer."""


class _NoRedirects(HTTPRedirectHandler):
    """A redirect would take the password to wherever the answer says."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class Api:
    """One address of the management API, with the login and the certificates of the connection to the broker."""

    def __init__(
        self,
        broker_url: str,
        management_url: str | None,
        *,
        tls_ca_file: str | None = None,
        tls_cert_file: str | None = None,
        tls_key_file: str | None = None,
        tls_verify: bool = True,
        external: bool = False,
        token_file: str | None = None,
        timeout: float = ANSWERS_WITHIN,
    ) -> None:
        self._timeout = timeout
        broker = urlsplit(broker_url)
        own = urlsplit(management_url) if management_url else broker
        self.user = "USER" if external or token_file else unquote(broker.username or "guest")
        """The user of the AMQP connection, for a command to be shown; the API may have another user."""
        self.vhost = vhost_of(broker_url)
        user = unquote(own.username or broker.username or "guest")
        password = unquote(own.password or broker.password or "guest")
        self._login = base64.b64encode(f"{user}:{password}".encode()).decode()
        # An address with a user of its own is for the password that is beside it.
        self._token_file = None if management_url and own.username else token_file
        if management_url:
            self.address = f"{own.scheme}://{own.netloc.rpartition('@')[2]}{own.path.rstrip('/')}"
        else:
            host = f"[{broker.hostname}]" if ":" in (broker.hostname or "") else broker.hostname
            self.address = f"https://{host}:15671" if broker.scheme == "amqps" else f"http://{host}:15672"
        self._tls_files = tls_ca_file, tls_cert_file, tls_key_file
        self._tls_verify = tls_verify

    def ask(self, *path: str, query: str = "") -> Answer:
        """The answer to a path in parts, which are quoted here; NoReply if there is none."""
        content, date = self._request("GET", path, query, None)
        try:
            return Answer(json.loads(content), date)
        except (ValueError, RecursionError) as error:
            raise NoReply(self._where(path), f"the management API does not answer: {error}") from error

    def change(self, method: str, *path: str, body: Mapping[str, object] | None = None) -> None:
        """Send a PUT or a DELETE; NoReply, with the text of the refusal, if the broker does not do it."""
        self._request(method, path, "", None if body is None else json.dumps(body).encode())

    def _where(self, path: Iterable[str]) -> str:
        place = "/".join(quote(part, safe="") for part in path)
        return f"{self.address}/api/{place}"

    def _request(self, method: str, path: Sequence[str], query: str, body: bytes | None) -> tuple[bytes, str | None]:
        where = self._where(path)
        if not where.startswith(("http://", "https://")):
            raise SettingsError("the management address must begin with http:// or https://")
        token = self._token_file and token_in(self._token_file, self.address)
        headers = {"Authorization": f"Bearer {token}" if token else f"Basic {self._login}"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        url = f"{where}?{query}" if query else where
        request = Request(url, data=body, headers=headers, method=method)  # noqa: S310  (checked above)
        try:
            with self._opener.open(request, timeout=self._timeout) as response:
                return _whole(response), response.headers.get("Date")
        except HTTPError as error:
            content = b""
            with error, suppress(OSError, HTTPException):  # the code has said it; the text may be cut
                content = error.read(_LONGEST_ERROR)
            why = f"the management API answers {error.code} {error.reason}"
            raise NoReply(where, why, error.code, content, error.headers.get("Date")) from error
        except (OSError, ValueError, HTTPException) as error:
            why = f"the management API does not answer: {getattr(error, 'reason', None) or error}"
            raise NoReply(where, why) from error

    @cached_property
    def _opener(self) -> OpenerDirector:
        if not self.address.startswith("https://"):
            return build_opener(_NoRedirects)
        return build_opener(_NoRedirects, HTTPSHandler(context=tls_context(*self._tls_files, verify=self._tls_verify)))


def _whole(response: Any) -> bytes:
    """The answer, with limits on size and time: what listens there may not be RabbitMQ."""
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
    """The names as they stood, then what the wildcards match; each name once."""
    unmatched: tuple[str, ...]
    """Wildcards that match no queue."""
    left_out: tuple[str, ...]
    """A sentence for each queue that a wildcard matches and that nothing can be taken from."""
    types: Mapping[str, str]
    """The types (classic or quorum) of the queues that wildcards match."""


def expansion(names: Iterable[str], api: Api) -> Expansion:
    """Names as they stand, wildcards (`*` and `?`) as the queues they match; only wildcards need the API."""
    found: dict[str, None] = {}
    wildcards: dict[str, re.Pattern[str]] = {}
    for name in names:
        if is_wildcard(name):
            wildcards[name] = pattern(name)
        else:
            found[name] = None
    unmatched = dict.fromkeys(wildcards)
    left_out: dict[str, None] = {}
    types: dict[str, str] = {}
    if wildcards:
        for queue, kind in _shared_queues(api):
            matching = [name for name, wildcard in wildcards.items() if wildcard.fullmatch(queue)]
            for name in matching:
                unmatched.pop(name, None)
            if not matching or queue in found:
                continue
            if why := _why_left_out(queue, is_stream=kind == "stream"):
                left_out[why] = None
            else:
                found[queue] = None
                if kind in _TYPES:
                    types[queue] = kind
    return Expansion(tuple(found), tuple(unmatched), tuple(left_out), types)


def _shared_queues(api: Api) -> list[tuple[str, str]]:
    """Name and type of each queue that is not exclusive; to ask for an exclusive queue would end the run."""
    try:
        found = list(pages(api, "name,exclusive,type"))
    except NoReply as failure:
        if failure.code is None:
            raise BrokerUnreachable(failure.where, f"{failure.why}; {_NO_PAGES}") from failure
        raise
    return sorted((queue["name"], str(queue.get("type") or "")) for queue in found if not queue.get("exclusive"))


def _why_left_out(queue: str, *, is_stream: bool) -> str:
    """Why it is left out: a name that AMQP cannot carry would end the run, and so would a get from a stream."""
    try:
        size = len(queue.encode())
    except UnicodeEncodeError:
        size = 0
    if not 1 <= size <= LONGEST_NAME:
        return (
            f"'{ascii(queue[:_SHOWN])[1:-1]}' is left out: the management API names it, but no queue can be called so"
        )
    return f"'{queue}' is a stream and is left out" if is_stream else ""


def pages(api: Api, columns: str) -> Iterator[dict[str, Any]]:
    """These columns of every queue in the virtual host; BrokerUnreachable if the API does not answer."""
    for page in range(1, MOST_PAGES + 1):
        try:
            answer = api.ask("queues", api.vhost, query=f"page={page}&page_size={PAGE}&columns={columns}").content
        except NoReply as failure:
            if page > 1 and failure.code == _BAD_REQUEST and b"page_out_of_range" in failure.content:
                return  # queues were deleted since the page before
            raise
        if not _is_page(answer):
            raise BrokerUnreachable(f"{api.address}/api/queues", "the answer is not a list of queues")
        yield from answer["items"]
        if page >= answer["page_count"]:
            return


def _is_page(answer: Any) -> bool:
    return (
        isinstance(answer, dict)
        and isinstance(answer.get("page_count"), int)
        and isinstance(answer.get("items"), list)
        and all(isinstance(item, dict) and isinstance(item.get("name"), str) for item in answer["items"])
    )


SECONDS: Final = 15.0
"""Seconds that all requests of a run may take together."""
_UNAUTHORISED: Final = 401
_DO: Final = "; set dlqbatch.management-url to the management API of this broker"


class Unanswered(Exception):
    """The management API does not say; the text says why and what to do."""


class Client:
    """The management API for one run: after a failure it is not asked again, or only after some seconds."""

    def __init__(self, api: Api, *, asks_again_after: float = math.inf) -> None:
        self.api = api
        self.vhost = api.vhost
        self.silent: str | None = None
        """Why it does not answer, if it does not."""
        self._asks_again_after = asks_again_after
        self._silent_until = math.inf

    def get(self, *path: str, query: str = "") -> Any:
        """The content of the answer; None for what is not there. Unanswered if there is none."""
        self._raise_if_silent()
        try:
            return self._ask(*path, query=query)
        except NoReply as failure:
            if failure.code == NOT_FOUND:
                return None
            raise self.give_up(self._explain(failure)) from failure

    def queues(self, columns: str) -> Iterator[dict[str, Any]]:
        """These columns of every queue in the virtual host; Unanswered if the API does not answer."""
        self._raise_if_silent()
        try:
            yield from pages(self.api, columns)
        except BrokerUnreachable as failure:
            raise self.give_up(failure.why) from failure

    def give_up(self, why: str) -> Unanswered:
        """Ask the API no more, because of this."""
        self.silent, self._silent_until = why, time.monotonic() + self._asks_again_after
        _log.info("what only the management API can tell stays unknown", why=why)
        return Unanswered(why)

    def _raise_if_silent(self) -> None:
        if self.silent is not None and time.monotonic() < self._silent_until:
            raise Unanswered(self.silent)
        self.silent = None

    def _ask(self, *path: str, query: str) -> Any:
        return self.api.ask(*path, query=query).content

    def _explain(self, failure: NoReply) -> str:
        return failure.why


_AnyClient = TypeVar("_AnyClient", bound=Client)
_Question = ParamSpec("_Question")
_Found = TypeVar("_Found")


def none_if_unanswered(
    question: Callable[Concatenate[_AnyClient, _Question], _Found | None],
) -> Callable[Concatenate[_AnyClient, _Question], _Found | None]:
    """Make a method return None where the API does not answer, or answers with types that RabbitMQ never gives."""

    @wraps(question)
    def asked(client: _AnyClient, /, *arguments: _Question.args, **named: _Question.kwargs) -> _Found | None:
        try:
            return question(client, *arguments, **named)
        except Unanswered:
            return None
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            client.silent = client.silent or f"the management API's answer makes no sense ({type(error).__name__})"
            return None

    return asked


class CheckedApi(Client):
    """A client that makes sure that the API is the one of our broker, and spends only so many seconds on it."""

    def __init__(self, api: Api, connection: Connection, *, seconds: float = SECONDS) -> None:
        super().__init__(api)
        self._connection = connection
        self._left = seconds
        self._is_checked = False
        self.has_counters = True
        """False: the broker is set not to count messages."""

    def get(self, *path: str, query: str = "") -> Any:
        if not self._is_checked:
            self._is_checked = True
            self._check()
        return super().get(*path, query=query)

    def is_not_rabbitmq(self, error: Exception) -> Unanswered:
        return self.give_up(
            f"what answers at {self.api.address} is no management API of RabbitMQ ({type(error).__name__}){_DO}"
        )

    def _ask(self, *path: str, query: str) -> Any:
        began = time.monotonic()
        try:
            content = super()._ask(*path, query=query)
        finally:
            self._left -= time.monotonic() - began
        if not isinstance(content, (dict, list)):
            raise self.is_not_rabbitmq(TypeError())
        if self._left <= 0:
            self.silent = f"the management API at {self.api.address} answers too slowly"
        return content

    def _explain(self, failure: NoReply) -> str:
        if failure.code == _UNAUTHORISED:
            return (
                f"the management API at {self.api.address} does not let this user in: give it the tag 'management' "
                "(rabbitmqctl set_user_tags USER management)"
            )
        return f"{failure.why} ({self.api.address}){_DO}"

    def _check(self) -> None:
        """Compare the API's broker with the one that AMQP leads to: the default address may be a neighbour's."""
        answer = super().get("overview")
        answer = answer if isinstance(answer, dict) else {}
        ours: Mapping[str, Any] = self._connection.wire.server_properties or {}
        pairs = [
            (_text(ours.get("cluster_name")), _text(answer.get("cluster_name"))),
            # While a cluster is upgraded its nodes are of two releases; for so long nothing is proven.
            (_text(ours.get("version")), _text(answer.get("product_version") or answer.get("rabbitmq_version"))),
        ]
        for here, there in pairs:
            if here and there and here != there:
                raise self.give_up(
                    f"the management API at {self.api.address} is of another broker: it names '{there}', the AMQP "
                    f"connection '{here}'{_DO}"
                )
        self.has_counters = answer.get("disable_stats") is not True and answer.get("rates_mode") != "none"


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value if isinstance(value, str) else ""
