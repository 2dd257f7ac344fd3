"""What a webhook is sent: JSON for Slack and programs, an adaptive card for Teams, an event for PagerDuty; signed.

Slack: text and blocks of an incoming webhook. Teams: a message with one adaptive card, as a workflow takes it.
PagerDuty: Events API v2, one event for each alert, which triggers and resolves by the same key. Signatures: Standard
Webhooks.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple
from urllib.parse import quote

from dlqbatch.monitor.alert_rules import Notice, command_for
from dlqbatch.store.states import NEW_GROUP

Kind = Literal["slack", "teams", "pagerduty"]
SHOWN: Final = 20
"""The most alerts that one message has in full; of the others it has the number."""
_LONGEST_TEXT: Final = 500
_LONGEST_SUMMARY: Final = 1_024  # PagerDuty's bound
_LONGEST_KEY: Final = 255  # of a dedup_key of PagerDuty's
_MARKS: Final = {"critical": ":rotating_light:", "warning": ":warning:", "resolved": ":white_check_mark:"}
_COLOURS: Final = {"critical": "Attention", "warning": "Warning", "resolved": "Good"}
_SECRET_PREFIX: Final = "whsec_"  # noqa: S105  (what every such secret begins with)


class Message(NamedTuple):
    id: str
    """The same for each try of the same alerts, so that its receiver can tell that it has it already."""
    body: bytes


@dataclass(frozen=True, slots=True)
class Form:
    """How alerts become messages."""

    kind: Kind = "slack"
    scope: str = "dlqbatch"
    """Whose alerts these are: receivers may be shared by many deployments."""
    console_url: str | None = None
    key: str = ""
    """PagerDuty's integration key, which names the service there."""

    @property
    def at_once(self) -> int | None:
        """The most alerts that are handed over at once; None: any number, of which one message tells."""
        return SHOWN if self.kind == "pagerduty" else None

    def messages(self, notices: Sequence[Notice]) -> list[Message]:
        if self.kind == "pagerduty":
            return [_message([notice], self._event(notice)) for notice in notices]
        return [_message(notices, (self._card if self.kind == "teams" else self._slack)(notices))]

    def dedup_key(self, notice: Notice) -> str:
        """The same from firing to the end of an alert, and for the next one about the same thing."""
        whole = f"{self.scope}/{notice.name}/{notice.subject}"
        if len(whole) <= _LONGEST_KEY:
            return whole
        return f"{whole[: _LONGEST_KEY - 65]}/{hashlib.sha256(whole.encode('utf-8', 'surrogatepass')).hexdigest()}"

    def link(self, notice: Notice) -> str | None:
        """The page of the console about this."""
        if self.console_url is None:
            return None
        page = f"/groups/{quote(notice.subject, safe='')}" if notice.name == NEW_GROUP else "/"
        return f"{self.console_url.rstrip('/')}{page}"

    def described(self, notice: Notice) -> dict[str, object]:
        """For a program: the alert, its key, and what to do."""
        to_do = {"command": command_for(notice.name, notice.subject), "console": self.link(notice)}
        return {**notice.as_dict(), "scope": self.scope, "dedup_key": self.dedup_key(notice), **to_do}

    def _slack(self, notices: Sequence[Notice]) -> dict[str, object]:
        lines = lines_of(notices, self._slack_line)
        return {
            "text": "\n".join(lines),
            "blocks": [{"type": "section", "text": {"type": "mrkdwn", "text": line}} for line in lines],
            "source": "dlqbatch",
            "alerts": [self.described(notice) for notice in notices[:SHOWN]],
            "more": max(len(notices) - SHOWN, 0),
        }

    def _slack_line(self, notice: Notice, before: str) -> str:
        # Slack takes these three characters for the beginning of links, mentions and entities.
        summary = notice.summary[:_LONGEST_TEXT].replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        link = self.link(notice)
        return f"{_MARKS[state_of(notice)]} *{notice.name}* ({state_of(notice)}): {before}{summary}" + (
            f" <{link}|console>" if link is not None else ""
        )

    def _card(self, notices: Sequence[Notice]) -> dict[str, object]:
        body: list[dict[str, object]] = []
        for notice in notices[:SHOWN]:
            state = state_of(notice)
            before = "" if notice.state == "fired" else "it was: "
            title = f"{notice.name} ({state}), {self.scope}"
            body += [
                {"type": "TextBlock", "weight": "Bolder", "color": _COLOURS[state], "wrap": True, "text": title},
                {"type": "TextBlock", "wrap": True, "text": f"{before}{notice.summary[:_LONGEST_TEXT]}"},
            ]
        if len(notices) > SHOWN:
            body.append({"type": "TextBlock", "text": f"and {len(notices) - SHOWN:,} more: dlqbatch status"})
        card: dict[str, object] = {
            "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
            "type": "AdaptiveCard",
            "version": "1.4",
            "body": body,
        }
        if (link := self.link(notices[0])) is not None:
            card["actions"] = [{"type": "Action.OpenUrl", "title": "Console", "url": link}]
        content = {"contentType": "application/vnd.microsoft.card.adaptive", "contentUrl": None, "content": card}
        return {"type": "message", "attachments": [content]}

    def _event(self, notice: Notice) -> dict[str, object]:
        event: dict[str, object] = {"routing_key": self.key, "dedup_key": self.dedup_key(notice)}
        if notice.state != "fired":
            return event | {"event_action": "resolve"}
        payload = {
            "summary": f"{notice.name}: {notice.summary}"[:_LONGEST_SUMMARY],
            "source": self.scope,
            "severity": notice.severity.value,
            "timestamp": notice.fired_at.isoformat(),
            "component": "dlqbatch",
            "class": notice.name,
            "custom_details": self.described(notice),
        }
        link = self.link(notice)
        links = {"links": [{"href": link, "text": "Console"}]} if link is not None else {}
        return event | {"event_action": "trigger", "client": "dlqbatch", "payload": payload, **links}


def state_of(notice: Notice) -> str:
    return notice.severity.value if notice.state == "fired" else "resolved"


def lines_of(notices: Sequence[Notice], line: Callable[[Notice, str], str]) -> list[str]:
    """A line for each of the first alerts, and one with the number of the others; `line` also gets a prefix."""
    shown = [line(notice, "" if notice.state == "fired" else "it was: ") for notice in notices[:SHOWN]]
    more = len(notices) - SHOWN
    return [*shown, f"… and {more:,} more. Look: dlqbatch status"] if more > 0 else shown


def _message(notices: Sequence[Notice], content: Mapping[str, object]) -> Message:
    named = ",".join(f"{notice.id}:{notice.state}" for notice in notices)
    identity = hashlib.sha256(f"{named} {notices[0].fired_at.isoformat()}".encode()).hexdigest()[:32]
    return Message(f"msg_{identity}", json.dumps(content).encode())


def signature_headers(secret: str, message: Message, seconds: int) -> dict[str, str]:
    """The headers of Standard Webhooks for a message that is sent at this Unix time."""
    key = base64.b64decode(secret.removeprefix(_SECRET_PREFIX))
    signed = f"{message.id}.{seconds}.".encode() + message.body
    digest = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    return {"webhook-id": message.id, "webhook-timestamp": str(seconds), "webhook-signature": f"v1,{digest}"}
