"""The broker's management API, for the one thing AMQP cannot tell: which queues there are."""

from __future__ import annotations

import base64
import json
import re
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, Final
from urllib.error import HTTPError
from urllib.parse import quote, unquote, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from dlqbatch.errors import BrokerUnreachable, SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_PAGE: Final = 500
"""Queues in one answer; the API gives no more."""
_MOST_PAGES: Final = 1000
_TIMEOUT: Final = 15.0
_LONGEST_ERROR: Final = 4096
_BAD_REQUEST: Final = 400


class _NoRedirects(HTTPRedirectHandler):
    """A redirect would take the password to wherever the answer says."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


_OPENER: Final = build_opener(_NoRedirects)


def expand(names: Iterable[str], broker_url: str, management_url: str | None) -> tuple[str, ...]:
    """Names as they stand, wildcards (`*`) as the queues they match, each queue once; only wildcards need the API."""
    found: dict[str, None] = {}
    wildcards: list[re.Pattern[str]] = []
    for name in names:
        if "*" in name:
            wildcards.append(re.compile(".*".join(re.escape(part) for part in name.split("*")), re.DOTALL))
        else:
            found[name] = None
    if wildcards:
        for queue in sorted(_queues(broker_url, management_url)):
            if any(wildcard.fullmatch(queue) for wildcard in wildcards):
                found[queue] = None
    return tuple(found)


def _queues(broker_url: str, management_url: str | None) -> Iterator[str]:
    broker = urlsplit(broker_url)
    vhost = unquote(broker.path[1:]) or "/"
    api = urlsplit(management_url) if management_url else broker
    user = unquote(api.username or broker.username or "guest")
    password = unquote(api.password or broker.password or "guest")
    if management_url:
        base = f"{api.scheme}://{api.netloc.rpartition('@')[2]}{api.path.rstrip('/')}"
    else:
        host = f"[{broker.hostname}]" if ":" in (broker.hostname or "") else broker.hostname
        base = f"https://{host}:15671" if broker.scheme == "amqps" else f"http://{host}:15672"
    token = base64.b64encode(f"{user}:{password}".encode()).decode()
    for page in range(1, _MOST_PAGES + 1):
        address = f"{base}/api/queues/{quote(vhost, safe='')}?page={page}&page_size={_PAGE}&columns=name,exclusive"
        answer = _get(address, token, is_first=page == 1)
        if answer is None:
            return
        # An exclusive queue is closed to everybody but its owner: to ask for it would end the run.
        yield from (item["name"] for item in answer["items"] if not item.get("exclusive"))
        if page >= answer["page_count"]:
            return


def _get(address: str, token: str, *, is_first: bool) -> dict[str, Any] | None:
    """One page; None for one that is no longer there."""
    where = address.partition("?")[0]
    if not address.startswith(("http://", "https://")):
        raise SettingsError("the management address must begin with http:// or https://")
    request = Request(address, headers={"Authorization": f"Basic {token}"})  # noqa: S310  (checked above)
    try:
        with _OPENER.open(request, timeout=_TIMEOUT) as response:
            answer = json.load(response)
    except HTTPError as error:
        with error:
            text = error.read(_LONGEST_ERROR)
        if not is_first and error.code == _BAD_REQUEST and b"page_out_of_range" in text:
            return None  # queues were deleted since the page before
        raise BrokerUnreachable(where, f"the management API answers {error.code} {error.reason}") from error
    except (OSError, ValueError, HTTPException) as error:
        why = getattr(error, "reason", None) or error
        raise BrokerUnreachable(
            where, f"{why}; wildcards need the management API (management_url), names do not"
        ) from error
    if not _is_page(answer):
        raise BrokerUnreachable(where, "the answer is not a list of queues")
    return answer  # type: ignore[no-any-return]  # seen to be one


def _is_page(answer: Any) -> bool:
    return (
        isinstance(answer, dict)
        and isinstance(answer.get("page_count"), int)
        and isinstance(answer.get("items"), list)
        and all(isinstance(item, dict) and isinstance(item.get("name"), str) for item in answer["items"])
    )
