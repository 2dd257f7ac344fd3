"""The rules that every installation starts with; their order is their sense.

A type says more than a text, so types come first; among the texts what is wrong with the message itself comes before
what was wrong with the world, for "the field 'timeout' must be a number" is no time-out. What is in doubt is manual:
that costs a person a look, and a wrong retry costs the origin five.

time-outs, connections  immediate: they pass by themselves, mostly within minutes
429, quotas             scheduled: whoever says slow down is not asked again in a minute
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

from typing import Final

from dlqbatch.policy.classify import On, Rule
from dlqbatch.policy.strategy import Strategy

_TYPE, _TEXT, _ANY = On.TYPE, On.TEXT, On.ANY
_IMMEDIATE, _SCHEDULED = Strategy.IMMEDIATE, Strategy.SCHEDULED
_CONDITIONAL, _MANUAL = Strategy.CONDITIONAL, Strategy.MANUAL

_APART: Final = 10
"""Between two positions, so that a person's rule fits in."""


def _rule(number: int, name: str, on: On, strategy: Strategy, *ways: str) -> Rule:
    return Rule(number * _APART, name, on, "|".join(ways), strategy)


def _status(codes: str) -> str:
    """A status code; without one of these words in front, three digits are any number."""
    words = r"\b(?:http(?:/[\d.]{1,3})?|status(?:[ _-]?code)?|response|code|error|success|returned)"
    return rf"{words}[ :=(\[']{{1,4}}{codes}\b"


DEFAULT_RULES: Final = (
    # The broker's own reasons, whole: an exception may have one of these words in its name.
    _rule(1, "broker-expired", _TYPE, _CONDITIONAL, r"^expired$"),
    _rule(2, "broker-full", _TYPE, _SCHEDULED, r"^maxlen$"),
    _rule(3, "broker-delivery-limit", _TYPE, _MANUAL, r"^delivery_limit$"),
    _rule(4, "broker-rejected", _TYPE, _MANUAL, r"^rejected$"),
    # Node's fetch raises a TypeError for every network failure there is.
    _rule(5, "fetch-failed", _TEXT, _IMMEDIATE, r"^(?:TypeError: )?fetch failed\b"),
    _rule(
        6,
        "rate-limit-type",
        _TYPE,
        _SCHEDULED,
        r"too_?many_?requests|rate_?limit|throttl|quota_?exceeded|request_?limit_?exceeded|throughput_?exceeded",
    ),
    _rule(
        7,
        "authorisation-type",
        _TYPE,
        _MANUAL,
        r"unauthori[sz]ed|forbidden|access_?denied|access_?refused|authentication|authori[sz]ation|bad_?credentials",
        r"permission_?(?:error|denied)|security_?exception|(?:expired|invalid)_?(?:token|signature)",
    ),
    _rule(
        8,
        "outage-type",
        _TYPE,
        _CONDITIONAL,
        r"service_?unavailable|bad_?gateway|gateway_?time_?out|server_?error\b|server_?error_?exception",
        r"broken_?circuit|circuit_?(?:breaker|open)|call_?not_?permitted|bulkhead|rejected_?execution",
        r"out_?of_?memory|memory_?error|insufficient_?resources",
    ),
    _rule(
        9,
        "conflict-type",
        _TYPE,
        _IMMEDIATE,
        r"deadlock|cannot_?acquire_?lock|lock_?(?:acquisition|time_?out|wait|not_?available)|optimistic_?lock",
        r"stale_?(?:object|state)|concurrency|serialization_?failure|transaction_?rollback",
    ),
    _rule(
        10,
        "time-out-type",
        _TYPE,
        _IMMEDIATE,
        r"time_?d?_?out|deadline_?exceeded|(?:task|operation)_?cancell?ed",
    ),
    _rule(
        11,
        "connection-type",
        _TYPE,
        _IMMEDIATE,
        r"connect(?:ion)?_?(?:exception|error|reset|refused|aborted|closed|lost)|socket_?(?:exception|error)",
        r"broken_?pipe|no_?route_?to_?host|unknown_?host|no_?http_?response|endpoint_?not_?found|resource_?access",
        r"\be(?:connreset|connrefused|connaborted|pipe|notfound|ai_again|hostunreach|netunreach)\b",
        r"transient|(?:get|create)_?(?:jdbc_?connection|transaction)|jdbc_?connection|gaierror|\burl_?error\b",
        r"broker_?unreachable|already_?closed",
    ),
    _rule(
        12,
        "validation-type",
        _TYPE,
        _MANUAL,
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
    _rule(
        13,
        "rate-limit-status",
        _TEXT,
        _SCHEDULED,
        _status("429"),
        r"^429\b|\b429 (?:too|client)|too many requests|resource_?exhausted\b",
    ),
    _rule(
        14,
        "validation",
        _TEXT,
        _MANUAL,
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
    _rule(
        15,
        "authorisation",
        _TEXT,
        _MANUAL,
        _status("40[13]"),
        r"^40[13]\b|\b401 unauthori[sz]ed|\b40[13] client|\b403 forbidden|unauthori[sz]ed\b|not authori[sz]ed",
        r"access (?:is |was )?(?:denied|refused)|access_?(?:denied|refused)|permission.{0,20}denied|unauthenticated",
        r"authentication (?:failed|failure|required)|certificate verify failed|login failed for user",
        r"(?:invalid|expired|bad|wrong) (?:api[ _-]?key|credentials?|access token|token|signature|password)",
        r"\b(?:token|certificate|jwt) (?:has |is )?expired",
    ),
    _rule(
        16,
        "rate-limit",
        _TEXT,
        _SCHEDULED,
        r"\brate[ _-]?limit|\bthrottl(?:ed|ing)|\bquota\b.{0,60}(?:exceed|exhaust|reached|limit)|\brate exceeded",
        r"(?:exceed|exhaust|reached|over).{0,60}\bquota\b|(?:request|usage|api) limit|\bslow down\b",
    ),
    _rule(
        17,
        "outage",
        _TEXT,
        _CONDITIONAL,
        _status(r"50\d"),
        r"^50[0-4]\b|\b50[0-4] (?:internal|bad|service|gateway|server error)|internal server error|bad gateway",
        r"service (?:is )?(?:currently )?unavailable|gateway time-?out|code = (?:unavailable|internal)\b",
        r"\bUNAVAILABLE: ",
        r"circuit.{0,40}\bopen\b|no space left|out of memory|upstream connect error|maintenance",
        r"too many (?:connections|clients)|connection slots",
    ),
    _rule(
        18,
        "conflict",
        _TEXT,
        _IMMEDIATE,
        r"deadlock|lock wait time-?out|could not (?:serialize access|obtain lock)|database is locked",
        r"row was updated or deleted by another",
    ),
    _rule(
        19,
        "time-out",
        _TEXT,
        _IMMEDIATE,
        r"\btimed[ -]?out\b|deadline ?exceeded|httpclient\.timeout|\be(?:socket)?timedout\b",
        r"\btime[ -]?out(?:error)?[ :]{0,2}(?:of|after|expired|exceeded|elapsed|waiting|while|reached|during|period)",
        r"\b(?:read|connect|connection|socket|request|response|i/o|operation|api|query|command|execution|statement)"
        r"[ -]time[ -]?out\b",
        r"did not (?:respond|complete|answer) (?:in time|within)|no response (?:received )?(?:from|within)",
    ),
    _rule(
        20,
        "connection",
        _TEXT,
        _IMMEDIATE,
        r"\bconnection (?:was |is |has been |to .{1,80} |with .{1,80} )?(?:unexpectedly |forcibly )?"
        r"(?:reset|refused|aborted|closed|lost|terminated|broken|dropped|failed|failure|shut ?down)",
        r"\be(?:connreset|connrefused|connaborted|pipe|notfound|ai_again|hostunreach|netunreach)\b|broken pipe",
        r"no route to host|(?:name|node).{0,40} not known|name resolution|no such host|unknown host|getaddrinfo",
        r"network is unreachable|network-related|network error|host (?:is )?(?:unreachable|down)|unexpected eof",
        r"socket (?:hang up|closed|is closed)|forcibly closed|actively refused|server has gone away",
        r"server closed the connection|(?:unable|failed|could not|cannot) (?:to )?connect|try again later",
        r"temporar(?:y|ily) (?:failure|unavailable|unreachable)|premature (?:close|end)|tls handshake",
        r"remote end closed",
    ),
    _rule(21, "client-error", _TEXT, _MANUAL, _status(r"4\d\d"), r"^4\d\d\b|\b4\d\d client error"),
)
