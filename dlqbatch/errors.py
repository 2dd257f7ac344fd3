"""Everything that can go wrong, as one tree.

DlqbatchError                   carries `exit_code`: what the command line ends with
├── SettingsError          (2)  the configuration is wrong; nothing was connected to
├── PolicyMissing          (2)  no table, or not a single event: nothing was moved
├── TopologyMismatch       (2)  the broker holds a queue or exchange that differs from the settings
├── TopologyMissing        (2)  a queue or exchange is not there and this job may not make it
├── BrokerUnreachable      (4)  no connection
│   └── LoginRefused       (4)  the broker lets nobody in with this user, password and virtual host
├── BrokerLost             (4)  the connection went away before anything was taken
├── ChannelRefused         (1)  the broker closed a channel; code and text are its own
├── DatabaseUnreadable     (4)  the database cannot be reached, read or written
│   ├── DatabaseRefused    (4)  it lets nobody in with this user and password
│   ├── DatabaseForbids    (2)  its role has not the right: somebody has to grant it
│   ├── TablesMissing      (2)  it is there, and the tables of this version are not
│   ├── CommitUnanswered   (4)  whether the last change was made is not known
│   ├── ActionCut          (4)  a part of an action was done
│   └── DatabaseLost       (4)  it went away when messages had been sent
├── RemoteUnreachable, TokenRefused, DecisionUnknown, DoneBefore, NotKnownHere   (4)
│                               a console (--remote), or what became of a decision that was sent to it
├── OtherVersion           (2)  what answers is no console that knows the request
├── AwsRefused             (4)  AWS, or the network on the way there, said no
├── SecretUnreadable       (4)  the settings name a secret that cannot be had
└── beside what they are about:
    ├── RuleRefused, MoveRefused, EditRefused, NotUnderstood, NoSuchPlan, PlanRefused, ChangeNotSafe,
    │   HealthAddressRefused, PolicyRefused                                                            (2)
    │                           the request cannot be carried out: nothing was changed
    ├── NoSuchMessage, NoSuchCopy, NoSuchAction, NotUndoable, NotHeld, NotEditable, NothingEdited, EditorFailed,
    │   NoSuchGroup, NumberUnexpected, Unhealthy, ChangeUnderWay, HeadNotTaken                           (1)
    │                           it can be, but not in the present state
    ├── ChangeCutOff         (4)
    │                           it was begun; the same command goes on with it
    ├── ArchiveDamaged, ColdStorageFailed, FileNotWritten   (1)
    │                           a file that cannot be trusted, or not be written
    └── HealthAddressTaken   (1)
                                somebody else listens there

The message of an error says what happened, where, and what to do next; it never holds a secret.
"""

from __future__ import annotations

from ast import literal_eval
from contextlib import suppress

_NOTHING_MOVED = " No message was moved."
_GONE = ("NOT_FOUND - no queue '", "NOT_FOUND - no exchange '")


class DlqbatchError(Exception):
    exit_code = 1


class SettingsError(DlqbatchError):
    """One or more settings are wrong; `problems` holds one sentence for each."""

    exit_code = 2

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class PolicyMissing(DlqbatchError):
    """The policy does not name a single event, so that every message would count as not configured."""

    exit_code = 2


class TopologyMismatch(DlqbatchError):
    exit_code = 2

    def __init__(self, kind: str, name: str, argument: str, found: str, wanted: str) -> None:
        self.kind, self.name, self.argument, self.found, self.wanted = kind, name, argument, found, wanted
        set_back = f"Set queue-type to {found}" if argument == "x-queue-type" else "Set the option back"
        once = " once it is empty" if kind == "queue" else ""
        super().__init__(
            f"{kind} '{name}' differs from the settings: {argument} is {found} on the broker, {wanted} is wanted. "
            f"Nothing was moved. {set_back}, or delete the {kind}{once} and run again."
        )


class TopologyMissing(DlqbatchError):
    exit_code = 2

    def __init__(self, kind: str, name: str) -> None:
        self.kind, self.name = kind, name
        super().__init__(f"{kind} '{name}' is not on the broker. Run `dlqbatch topology apply`, or check its name.")


class BrokerUnreachable(DlqbatchError):
    exit_code = 4

    def __init__(self, where: str, why: str) -> None:
        self.where, self.why = where, why
        super().__init__(f"no connection to the broker at {where}: {why}. Nothing was taken.")


class LoginRefused(BrokerUnreachable):
    """No use in trying again at once; but no wrong usage either: a broker that cannot read its users says the same."""


class BrokerLost(DlqbatchError):
    exit_code = 4

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(f"the connection to the broker was lost: {why}. What was not settled is back in its queue.")


def readable(text: str) -> str:
    """What the broker says; pika writes a text that was cut inside a character as Python writes bytes."""
    if text[:2] in {"b'", 'b"'}:
        with suppress(ValueError, SyntaxError):
            return bytes(literal_eval(text)).decode(errors="replace")
    return text


class ChannelRefused(DlqbatchError):
    """The broker closed a channel."""

    def __init__(self, code: int, text: str) -> None:
        self.code, self.text = code, readable(text)
        super().__init__(f"the broker refused: {self.text} ({code})")

    @property
    def is_gone(self) -> bool:
        # A 404 is also the answer while a queue's home node is down, and the text holds names that anybody may choose:
        # only these two beginnings mean gone.
        return self.code == 404 and self.text.startswith(_GONE)  # noqa: PLR2004


class DatabaseUnreadable(DlqbatchError):
    exit_code = 4

    def __init__(self, where: str, why: str) -> None:
        self.where, self.why = where, why
        super().__init__(f"the database at {where} cannot be used: {why.rstrip('.')}.{_NOTHING_MOVED}")


class DatabaseRefused(DatabaseUnreadable):
    """The connection failed with the password in play: it is wrong, or the server refused what comes right after it."""


class DatabaseForbids(DatabaseUnreadable):
    """It is reached, and waiting does not help: the role lacks a right."""

    exit_code = 2


class TablesMissing(DatabaseUnreadable):
    """As PolicyMissing: waiting does not help, `dlqbatch db upgrade` does."""

    exit_code = 2


class TablesTaken(DatabaseUnreadable):
    """A table has the name of one of ours and was not made by dlqbatch; waiting does not help."""

    exit_code = 2


class CommitUnanswered(DatabaseUnreadable):
    """The connection went away with a commit under way."""

    def __init__(self, where: str, why: str) -> None:
        super().__init__(where, why)
        text = f"the database at {where} cannot be used: {why.rstrip('.')}. It has not answered a commit: "
        self.args = (f"{text}whether the last change was made is not known. Look before you repeat it.",)


class ActionCut(DatabaseUnreadable):
    """Some messages of an action were changed and committed, and the rest could not be."""

    def __init__(self, error: DatabaseUnreadable, action: str) -> None:
        super().__init__(error.where, error.why)
        text = f"the database at {error.where} cannot be used any more: {error.why.rstrip('.')}. "
        text += f"{action} holds what was changed before: look with `dlqbatch actions show {action}`. "
        self.args = (f"{text}The same command again goes on with the rest.",)


class DatabaseLost(DatabaseUnreadable):
    """Messages were sent, and their outcomes could not be stored."""

    def __init__(self, where: str, why: str, sent: int) -> None:
        super().__init__(where, why)
        text = f"the database at {where} cannot be used any more: {why.rstrip('.')}. {sent} message(s) had been sent: "
        text += "do the same again when it is back; what it has recorded is not sent again, and the rest goes out once "
        self.args = (f"{text}more under the same attempt number.",)


def so_far(error: DlqbatchError) -> str:
    """Its text where something was done before it: what it says of that is left out."""
    return str(error).removesuffix(_NOTHING_MOVED)
