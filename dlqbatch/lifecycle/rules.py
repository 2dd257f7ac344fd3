"""Which strategy a failure gets: the first rule that matches, else manual; and the rules of a new installation.

A pattern is a regular expression that anybody may write and every message is held against. Python's matcher can take
exponential time, so `compiled` allows only a part of the language, and only the first 2,048 characters of a text are
searched. Both together bound the steps of a match by pattern and text; see `_Parser`.

The order of the rules of a new installation matters. A type says more than a text, so types come first. Of the texts,
what is wrong with the message itself comes before what was wrong with the world, since "the field 'timeout' must be a
number" is no time-out. In doubt a failure is manual: that costs a person one look, and a wrong retry costs the origin
five.

time-outs, connections  immediate: they pass by themselves, mostly within minutes
429, quotas             scheduled: a service that says slow down is not called again in a minute
5xx, open circuits      conditional: it strikes every message of an origin at once, and the breaker lets one find out
conflicts, deadlocks    immediate: the other transaction is over by then
validation, other 4xx   manual: the same message fails the same way
authorisation           manual: a wrong password is not right the next time, and may lock the account
expired                 conditional: its consumer was down or too slow; it goes back when the origin is well
maxlen                  scheduled: too much at once, like a rate limit; off-peak there is room
delivery_limit          manual: delivered again and again, most likely because it brings its consumer down
rejected                manual: the consumer refused it and did not say why
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from dlqbatch.errors import DlqbatchError
from dlqbatch.store.states import On, Strategy

LONGEST_SEARCHED: Final = 2048  # characters of a type or text
_LONGEST_PATTERN: Final = 1000
_MOST_WAYS: Final = 10_000  # in which one pattern may match at one place of a text
_DEEPEST_GROUP: Final = 20
UNKNOWN: Final = "unknown"  # stands for a rule where none matches


class RuleRefused(DlqbatchError):
    """A pattern that is no regular expression, or one that could take too long."""

    exit_code = 2

    def __init__(self, pattern: str, why: str) -> None:
        self.pattern, self.why = pattern, why
        super().__init__(f"the pattern {pattern[:200]!r} cannot be a rule: {why}")


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the rules; the lowest position is tried first."""

    position: int
    name: str
    on: On
    pattern: str
    """A regular expression, found anywhere, in small or capital letters."""
    strategy: Strategy


@dataclass(frozen=True, slots=True)
class Match:
    """A rule that matches, and by what."""

    rule: Rule
    on: On
    """Type or text."""
    found: str


def classify(failure_type: str | None, message: str | None, rules: Iterable[Rule]) -> tuple[Strategy, str]:
    """The strategy, and the name of the rule that says so."""
    match = next(_matches(failure_type, message, rules), None)
    return (Strategy.MANUAL, UNKNOWN) if match is None else (match.rule.strategy, match.rule.name)


def explain(failure_type: str | None, message: str | None, rules: Iterable[Rule]) -> tuple[Match, ...]:
    """Every rule that matches, in order: the first decides, the others would without it."""
    return tuple(_matches(failure_type, message, rules))


def in_order(rules: Iterable[Rule]) -> list[Rule]:
    return sorted(rules, key=lambda rule: (rule.position, rule.name))


def _matches(failure_type: str | None, message: str | None, rules: Iterable[Rule]) -> Iterator[Match]:
    for rule in in_order(rules):
        for on, text in ((On.TYPE, failure_type), (On.TEXT, message)):
            if text and rule.on in {on, On.ANY}:
                found = compiled(rule.pattern).search(text[:LONGEST_SEARCHED])
                if found is not None:
                    yield Match(rule, on, found[0])
                    break


@lru_cache(maxsize=512)
def compiled(pattern: str) -> re.Pattern[str]:
    r"""The pattern, or RuleRefused; ask it before a rule is stored.

    Allowed: literals, `.`, classes, escapes such as \b \d \w \s, `|`, groups (plain, `(?:`, look-ahead), `? * + {m,n}`.
    """
    if not pattern or len(pattern) > _LONGEST_PATTERN:
        raise RuleRefused(pattern, f"it must have from 1 to {_LONGEST_PATTERN} characters")
    try:
        with warnings.catch_warnings():
            # It warns of what a later Python will read otherwise, as '[[a]'.
            warnings.simplefilter("error")
            expression = re.compile(pattern, re.IGNORECASE)
    except (re.error, OverflowError, RecursionError, Warning) as error:
        raise RuleRefused(pattern, f"{error}") from error
    if expression.match("") is not None:
        raise RuleRefused(pattern, "it matches every text; write what it is to find")
    _Parser(pattern).check()
    return expression


class _Parser:
    """Counts in how many ways a pattern can match at one place, and refuses one that has too many.

    A sequence multiplies the ways of its parts, a choice adds them up, a repetition has one way for each count. What is
    repeated a varying number of times must itself have one way only: `(a+)+` splits a text in exponentially many.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._depth = 0

    def check(self) -> None:
        ways = self._alternatives()
        if self._at < len(self._pattern):
            raise RuleRefused(self._pattern, f"the bracket at position {self._at} closes nothing")
        if ways > _MOST_WAYS:
            raise RuleRefused(
                self._pattern,
                f"it could match in {ways} ways at one place, and {_MOST_WAYS} are allowed; "
                "bound what it skips, as in 'read.{0,40}timed out', or make two rules of it",
            )

    def _next(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _alternatives(self) -> int:
        ways = self._sequence()
        while self._next() == "|":
            self._at += 1
            ways += self._sequence()
        return ways

    def _sequence(self) -> int:
        ways = 1
        while self._next() not in {"", "|", ")"}:
            ways *= self._repeated(self._atom())
        return ways

    def _atom(self) -> int:
        sign = self._next()
        if sign == "(":
            return self._group()
        if sign == "[":
            # A bracket that comes first in a class, after ^ if there is one, is a member of it.
            end = self._at + (2 if self._pattern.startswith("[^", self._at) else 1)
            end += 2 if self._pattern[end] == "\\" else 1
            while self._pattern[end] != "]":
                end += 2 if self._pattern[end] == "\\" else 1
            self._at = end + 1
        elif sign == "\\":
            if self._pattern[self._at + 1] in "123456789":
                raise RuleRefused(self._pattern, "it refers back to a group")
            self._at += 2
        else:
            self._at += 1
        return 1

    def _group(self) -> int:
        self._depth += 1
        if self._depth > _DEEPEST_GROUP:
            raise RuleRefused(self._pattern, f"its groups are nested deeper than {_DEEPEST_GROUP}")
        self._at += 1
        if self._next() == "?":
            if self._pattern[self._at + 1] not in ":=!":
                raise RuleRefused(self._pattern, "of the groups that begin with '(?' it may use (?:, (?= and (?! only")
            self._at += 2
        ways = self._alternatives()
        self._at += 1
        self._depth -= 1
        return ways

    _COUNTS: Final = re.compile(r"\{(\d*)(,?)(\d*)\}")

    def _repeated(self, ways: int) -> int:
        sign = self._next()
        least, most = 1, 1
        if sign and sign in "?*+":
            least, most = {"?": (0, 1), "*": (0, LONGEST_SEARCHED), "+": (1, LONGEST_SEARCHED)}[sign]
            self._at += 1
        elif (counts := self._COUNTS.match(self._pattern, self._at)) and (counts[1] or counts[2]):
            least = int(counts[1] or 0)
            most = int(counts[3] or LONGEST_SEARCHED) if counts[2] else least
            self._at = counts.end()
        else:
            return ways
        if self._next() in {"?", "+"}:
            self._at += 1
        if most > 1 and ways > 1:
            raise RuleRefused(self._pattern, "what it repeats can itself match in several ways; repeat something plain")
        if most <= 1:
            return ways + (least == 0)
        return ways * (min(most, LONGEST_SEARCHED) - min(least, LONGEST_SEARCHED) + 1)


# --- The rules of a new installation

_TYPE, _TEXT = On.TYPE, On.TEXT
_IMMEDIATE, _SCHEDULED = Strategy.IMMEDIATE, Strategy.SCHEDULED
_CONDITIONAL, _MANUAL = Strategy.CONDITIONAL, Strategy.MANUAL


def _status(codes: str) -> str:
    """A status code; without one of these words in front, three digits are any number."""
    words = r"\b(?:http(?:/[\d.]{1,3})?|status(?:[ _-]?code)?|response|code|error|success|returned)"
    return rf"{words}[ :=(\[']{{1,4}}{codes}\b"


_DEFAULTS: Final[dict[tuple[str, On, Strategy], tuple[str, ...]]] = {
    # The broker's own reasons, whole: an exception may have one of these words in its name.
    ("broker-expired", _TYPE, _CONDITIONAL): (r"^expired$",),
    ("broker-full", _TYPE, _SCHEDULED): (r"^maxlen$",),
    ("broker-delivery-limit", _TYPE, _MANUAL): (r"^delivery_limit$",),
    ("broker-rejected", _TYPE, _MANUAL): (r"^rejected$",),
    # Node's fetch raises a TypeError for every network failure there is.
    ("fetch-failed", _TEXT, _IMMEDIATE): (r"^(?:TypeError: )?fetch failed\b",),
    ("rate-limit-type", _TYPE, _SCHEDULED): (
        r"too_?many_?requests|rate_?limit|throttl|quota_?exceeded|request_?limit_?exceeded",
        r"throughput_?exceeded",
    ),
    ("authorisation-type", _TYPE, _MANUAL): (
        r"unauthori[sz]ed|forbidden|access_?denied|access_?refused|authentication|authori[sz]ation|bad_?credentials",
        r"permission_?(?:error|denied)|security_?exception|(?:expired|invalid)_?(?:token|signature)",
    ),
    ("outage-type", _TYPE, _CONDITIONAL): (
        r"service_?unavailable|bad_?gateway|gateway_?time_?out|server_?error\b|server_?error_?exception",
        r"broken_?circuit|circuit_?(?:breaker|open)|call_?not_?permitted|bulkhead|rejected_?execution",
        r"out_?of_?memory|memory_?error|insufficient_?resources",
    ),
    ("conflict-type", _TYPE, _IMMEDIATE): (
        r"deadlock|cannot_?acquire_?lock|lock_?(?:acquisition|time_?out|wait|not_?available)|optimistic_?lock",
        r"stale_?(?:object|state)|concurrency|serialization_?failure|transaction_?rollback",
    ),
    ("time-out-type", _TYPE, _IMMEDIATE): (r"time_?d?_?out|deadline_?exceeded|(?:task|operation)_?cancell?ed",),
    ("connection-type", _TYPE, _IMMEDIATE): (
        r"connect(?:ion)?_?(?:exception|error|reset|refused|aborted|closed|lost)|socket_?(?:exception|error)",
        r"broken_?pipe|no_?route_?to_?host|unknown_?host|no_?http_?response|endpoint_?not_?found|resource_?access",
        r"\be(?:connreset|connrefused|connaborted|pipe|notfound|ai_again|hostunreach|netunreach)\b",
        r"transient|(?:get|create)_?(?:jdbc_?connection|transaction)|jdbc_?connection|gaierror|\burl_?error\b",
        r"broker_?unreachable|already_?closed",
    ),
    ("validation-type", _TYPE, _MANUAL): (
        r"validation|constraint_?violation|(?:unique|not_?null|foreign_?key|check)_?violation|integrity|duplicate",
        r"invalid_?(?:argument|format|data|input|cast|request|value|type|message|content|payload|parameter|definition)",
        r"illegal_?argument|argument_?(?:null|out_?of_?range)?_?(?:exception|error)|format_?exception|number_?format",
        r"date_?time_?parse|pars(?:e|ing)_?(?:exception|error)|json|yaml|xml|zod|avro|serializ|unmarshal|syntax",
        r"message_?conversion|mismatched_?input|unrecognized_?property|bad_?request|unprocessable|not_?acceptable",
        r"not_?found|missing|conflict|null_?(?:pointer|reference)|class_?cast|index_?out_?of|out_?of_?(?:range|bounds)",
        r"no_?such_?(?:element|field|method|column|table|file)|does_?not_?exist|not_?supported|unsupported",
        r"not_?implemented|arithmetic|divide_?by_?zero|division|overflow|assertion",
        r"^(?:\w{1,60}\.)?(?:value|type|key|attribute|index|lookup|name|unicode(?:decode|encode)?|range|reference)_?error\b",
    ),
    # Texts: what is wrong with the message itself, before what was wrong with the world.
    ("rate-limit-status", _TEXT, _SCHEDULED): (
        _status("429"),
        r"^429\b|\b429 (?:too|client)|too many requests|resource_?exhausted\b",
    ),
    ("validation", _TEXT, _MANUAL): (
        r"validation (?:failed|error|failure)|\bfailed validation|schema (?:validation|mismatch|violation)",
        r"\b(?:must|should|may) (?:not )?(?:be|have|match|contain)\b",
        r"\b(?:is|are|was) (?:not (?:a )?valid|not allowed|not supported|invalid|required|malformed|missing|empty)\b",
        r"\b(?:in|not )valid (?:value|argument|format|field|input|json|xml|date|number|type|parameter|option|header)",
        r"cannot be (?:null|empty|blank|parsed|converted|deserialized)|(?:can|could )not (?:deserialize|parse|convert)",
        r"unexpected (?:token|character|end of)|malformed|unexpected end of|null value in column|out of range",
        r"(?:unknown|unrecogni[sz]ed|missing) (?:required )?(?:property|field|column|key|attribute|argument|parameter)",
        r"duplicate (?:key|entry)|violates .{0,60}constraint|constraint violat|does not match .{0,40}schema",
        r"code = (?:invalidargument|notfound|alreadyexists|failedprecondition|outofrange|unimplemented)\b",
    ),
    ("authorisation", _TEXT, _MANUAL): (
        _status("40[13]"),
        r"^40[13]\b|\b401 unauthori[sz]ed|\b40[13] client|\b403 forbidden|unauthori[sz]ed\b|not authori[sz]ed",
        r"access (?:is |was )?(?:denied|refused)|access_?(?:denied|refused)|permission.{0,20}denied|unauthenticated",
        r"authentication (?:failed|failure|required)|certificate verify failed|login failed for user",
        r"(?:invalid|expired|bad|wrong) (?:api[ _-]?key|credentials?|access token|token|signature|password)",
        r"\b(?:token|certificate|jwt) (?:has |is )?expired",
    ),
    ("rate-limit", _TEXT, _SCHEDULED): (
        r"\brate[ _-]?limit|\bthrottl(?:ed|ing)|\bquota\b.{0,60}(?:exceed|exhaust|reached|limit)|\brate exceeded",
        r"(?:exceed|exhaust|reached|over).{0,60}\bquota\b|(?:request|usage|api) limit|\bslow down\b",
    ),
    ("outage", _TEXT, _CONDITIONAL): (
        _status(r"50\d"),
        r"^50[0-4]\b|\b50[0-4] (?:internal|bad|service|gateway|server error)|internal server error|bad gateway",
        r"service (?:is )?(?:currently )?unavailable|gateway time-?out|code = (?:unavailable|internal)\b",
        r"\bUNAVAILABLE: ",
        r"circuit.{0,40}\bopen\b|no space left|out of memory|upstream connect error|maintenance",
        r"too many (?:connections|clients)|connection slots",
    ),
    ("conflict", _TEXT, _IMMEDIATE): (
        r"deadlock|lock wait time-?out|could not (?:serialize access|obtain lock)|database is locked",
        r"row was updated or deleted by another",
    ),
    ("time-out", _TEXT, _IMMEDIATE): (
        r"\btimed[ -]?out\b|deadline ?exceeded|httpclient\.timeout|\be(?:socket)?timedout\b",
        r"\btime[ -]?out(?:error)?[ :]{0,2}(?:of|after|expired|exceeded|elapsed|waiting|while|reached|during|period)",
        (
            r"\b(?:read|connect|connection|socket|request|response|i/o|operation|api|query|command|execution|statement)"
            r"[ -]time[ -]?out\b"
        ),
        r"did not (?:respond|complete|answer) (?:in time|within)|no response (?:received )?(?:from|within)",
    ),
    ("connection", _TEXT, _IMMEDIATE): (
        (
            r"\bconnection (?:was |is |has been |to .{1,80} |with .{1,80} )?(?:unexpectedly |forcibly )?"
            r"(?:reset|refused|aborted|closed|lost|terminated|broken|dropped|failed|failure|shut ?down)"
        ),
        r"\be(?:connreset|connrefused|connaborted|pipe|notfound|ai_again|hostunreach|netunreach)\b|broken pipe",
        r"no route to host|(?:name|node).{0,40} not known|name resolution|no such host|unknown host|getaddrinfo",
        r"network is unreachable|network-related|network error|host (?:is )?(?:unreachable|down)|unexpected eof",
        r"socket (?:hang up|closed|is closed)|forcibly closed|actively refused|server has gone away",
        r"server closed the connection|(?:unable|failed|could not|cannot) (?:to )?connect|try again later",
        r"temporar(?:y|ily) (?:failure|unavailable|unreachable)|premature (?:close|end)|tls handshake",
        r"remote end closed",
    ),
    ("client-error", _TEXT, _MANUAL): (
        _status(r"4\d\d"),
        r"^4\d\d\b|\b4\d\d client error",
    ),
}
# Positions have room between them, so that a person's rule fits in.
DEFAULT_RULES: Final = tuple(
    Rule(10 * number, name, on, "|".join(alternatives), strategy)
    for number, ((name, on, strategy), alternatives) in enumerate(_DEFAULTS.items(), 1)
)
