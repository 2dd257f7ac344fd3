"""Alerts to an SNS topic, and from there to mail, chat, a queue or another function.

Its attributes say of which severities, states and names the alerts are, so that a subscription can choose.
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any, Final

from dlqbatch.cloud import aws
from dlqbatch.errors import DlqbatchError
from dlqbatch.logs import plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlqbatch.policy.alerts import Notice

SECONDS: Final = 3.0
TOTAL: Final = 10.0
"""Of one try and of them all."""
SHOWN: Final = 20
"""So many alerts are told in full; of the rest, the number."""
LONGEST_SUBJECT: Final = 100
_LONGEST_TEXT: Final = 500
_ACTION: Final = "sns:Publish"
_TO_DO: Final = {
    "AuthorizationError": f"; allow {_ACTION} on it, and kms:GenerateDataKey and kms:Decrypt on its key if it has one",
    "NotFound": "; check dlqbatch.alert_topic (DLQBATCH_ALERT_TOPIC)",
}


def subject(notices: Sequence[Notice]) -> str:
    """One line of ASCII, as SNS takes it; of mail, it is the subject."""
    first, more = notices[0], len(notices) - 1
    text = f"dlqbatch: {first.name} ({_state(first)})" + (f" and {more:,} more" if more else "")
    return plain(text).encode("ascii", "replace").decode()[:LONGEST_SUBJECT]


def message(notices: Sequence[Notice]) -> str:
    lines = []
    for notice in notices[:SHOWN]:
        was = "" if notice.state == "fired" else "it was: "
        lines.append(f"{notice.name} ({_state(notice)}): {was}{plain(notice.summary, _LONGEST_TEXT)}")
    if len(notices) > SHOWN:
        lines.append(f"… and {len(notices) - SHOWN:,} more. Look: dlqbatch status")
    return "\n".join(lines)


def attributes(notices: Sequence[Notice]) -> dict[str, dict[str, str]]:
    """Lists of words, of which a filter policy matches any one: {"severity": ["critical"]}."""
    words = {
        "severity": {notice.severity.value for notice in notices},
        "state": {notice.state for notice in notices},
        "alert": {notice.name for notice in notices},
    }
    return {
        name: {"DataType": "String.Array", "StringValue": json.dumps(sorted(found))} for name, found in words.items()
    }


def _state(notice: Notice) -> str:
    return notice.severity.value if notice.state == "fired" else "resolved"


class Topic:
    def __init__(self, arn: str, total: float = TOTAL) -> None:
        self._arn, self._total = arn, total

    def tell(self, notices: Sequence[Notice]) -> str | None:
        """None if the topic took them; else why not, for a person. It never raises, and always ends."""
        failure: list[str] = []
        done = threading.Event()

        def publish() -> None:
            try:
                self._publish(notices)
            except aws.AwsRefused as error:
                failure.append(f"{error}{_TO_DO.get(error.code, '')}")
            except DlqbatchError as error:
                failure.append(str(error))
            except Exception as error:  # noqa: BLE001  (its text may hold anything)
                failure.append(type(error).__name__)
            done.set()

        # In a thread of its own: looking up a name or the credentials knows no time-out.
        threading.Thread(target=publish, daemon=True, name="topic").start()
        if not done.wait(max(self._total, 0.1)):
            failure.append(f"no answer within {self._total:.3g} s")
        return f"the topic {self._arn} was not told: {failure[0]}" if failure else None

    def _publish(self, notices: Sequence[Notice]) -> None:
        client: Any = aws.client("sns", seconds=min(SECONDS, self._total), region=aws.region_of(self._arn))
        with aws.asking(_ACTION):
            client.publish(
                TopicArn=self._arn,
                Subject=subject(notices),
                Message=message(notices),
                MessageAttributes=attributes(notices),
            )
