from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.lifecycle.rules import (
    DEFAULT_RULES,
    UNKNOWN,
    Match,
    Rule,
    RuleRefused,
    classify,
    compiled,
    explain,
)
from dlqbatch.store.states import On, Strategy

IMMEDIATE, SCHEDULED, CONDITIONAL, MANUAL = Strategy

# What services really write: type, message.
REALISTIC: dict[Strategy, list[tuple[str | None, str | None]]] = {
    IMMEDIATE: [
        # Java and Spring
        ("java.net.SocketTimeoutException", "Read timed out"),
        ("java.net.SocketTimeoutException", "timeout"),
        ("java.net.ConnectException", "Connection refused (Connection refused)"),
        ("java.io.IOException", "Connection reset by peer"),
        ("java.io.IOException", "Broken pipe"),
        ("java.net.UnknownHostException", "payments.internal"),
        (
            "org.springframework.web.client.ResourceAccessException",
            'I/O error on POST request for "http://stock:8080/take": Read timed out; nested exception is ...',
        ),
        ("org.springframework.dao.CannotAcquireLockException", "could not execute statement"),
        ("org.springframework.dao.DeadlockLoserDataAccessException", "Deadlock found when trying to get lock"),
        (
            "org.springframework.orm.ObjectOptimisticLockingFailureException",
            "Row was updated or deleted by another transaction",
        ),
        ("org.springframework.transaction.CannotCreateTransactionException", "Could not open JPA EntityManager"),
        ("org.springframework.dao.QueryTimeoutException", "Redis command timed out"),
        (None, "Failed to call stock service; nested exception is java.net.SocketTimeoutException: Read timed out"),
        # .NET
        ("System.TimeoutException", "The operation has timed out."),
        (
            "System.Threading.Tasks.TaskCanceledException",
            "The request was canceled due to the configured HttpClient.Timeout of 100 seconds elapsing.",
        ),
        (
            "System.Net.Http.HttpRequestException",
            "No connection could be made because the target machine actively refused it. (stock:80)",
        ),
        ("System.Net.Http.HttpRequestException", "Name or service not known (stock:443)"),
        ("System.Net.Sockets.SocketException", "An existing connection was forcibly closed by the remote host."),
        (
            "System.InvalidOperationException",
            "Timeout expired.  The timeout period elapsed prior to obtaining a connection from the pool.",
        ),
        (
            "Microsoft.Data.SqlClient.SqlException",
            "Execution Timeout Expired.  The timeout period elapsed prior to completion of the operation",
        ),
        (
            "Microsoft.Data.SqlClient.SqlException",
            "Transaction (Process ID 61) was deadlocked on lock resources with another process",
        ),
        (
            "Microsoft.Data.SqlClient.SqlException",
            "A network-related or instance-specific error occurred while establishing a connection to SQL Server.",
        ),
        ("Npgsql.PostgresException", "40001: could not serialize access due to concurrent update"),
        ("Npgsql.PostgresException", "57014: canceling statement due to statement timeout"),
        (
            "Microsoft.EntityFrameworkCore.DbUpdateConcurrencyException",
            "The database operation was expected to affect 1 row(s), but actually affected 0 row(s)",
        ),
        ("MassTransit.RequestTimeoutException", "Timeout waiting for response, RequestId: 4ae9"),
        # Python
        ("TimeoutError", None),
        (
            "requests.exceptions.ReadTimeout",
            "HTTPSConnectionPool(host='api', port=443): Read timed out. (read timeout=5)",
        ),
        (
            "requests.exceptions.ConnectionError",
            "('Connection aborted.', RemoteDisconnected('Remote end closed connection without response'))",
        ),
        ("ConnectionResetError", "[Errno 104] Connection reset by peer"),
        (
            "urllib3.exceptions.MaxRetryError",
            "Max retries exceeded with url: /v1 (NewConnectionError('[Errno 111] Connection refused'))",
        ),
        ("sqlalchemy.exc.OperationalError", "(psycopg2.OperationalError) server closed the connection unexpectedly"),
        ("redis.exceptions.ConnectionError", "Error 111 connecting to cache:6379. Connection refused."),
        ("socket.gaierror", "[Errno -3] Temporary failure in name resolution"),
        ("sqlite3.OperationalError", "database is locked"),
        # Go
        (
            "*url.Error",
            'Get "http://stock/1": context deadline exceeded (Client.Timeout exceeded while awaiting headers)',
        ),
        (None, "dial tcp 10.0.0.7:5432: connect: connection refused"),
        (None, "read tcp 10.0.0.7:51234->10.0.0.8:443: i/o timeout"),
        (None, "lookup stock on 10.96.0.10:53: no such host"),
        (None, "rpc error: code = DeadlineExceeded desc = context deadline exceeded"),
        # Node
        ("TypeError", "fetch failed"),
        ("Error", "connect ECONNREFUSED 127.0.0.1:5432"),
        ("Error", "getaddrinfo EAI_AGAIN stock"),
        ("Error", "socket hang up"),
        ("AxiosError", "timeout of 5000ms exceeded"),
        ("ETIMEDOUT", None),
        # The seed
        ("TIMEOUT_ERROR", "External API timeout after 5000ms"),
    ],
    SCHEDULED: [
        ("maxlen", "'orders' was full"),
        (
            "org.springframework.web.client.HttpClientErrorException$TooManyRequests",
            '429 Too Many Requests: "slow down"',
        ),
        ("org.springframework.web.client.HttpClientErrorException", "429 : [no body]"),
        (
            "com.amazonaws.services.dynamodbv2.model.ProvisionedThroughputExceededException",
            "The level of configured provisioned throughput was exceeded",
        ),
        (
            "System.Net.Http.HttpRequestException",
            "Response status code does not indicate success: 429 (Too Many Requests).",
        ),
        ("requests.exceptions.HTTPError", "429 Client Error: Too Many Requests for url: https://api.example.com/v1"),
        (
            "botocore.exceptions.ClientError",
            "An error occurred (ThrottlingException) when calling the GetItem operation: Rate exceeded",
        ),
        ("openai.RateLimitError", "You exceeded your current quota, please check your plan and billing details."),
        (None, "rpc error: code = ResourceExhausted desc = grpc: received message"),
        ("*googleapi.Error", "Quota exceeded for quota metric 'Read requests'"),
        ("AxiosError", "Request failed with status code 429"),
        ("RATE_LIMIT_ERROR", None),
        (None, "API rate limit exceeded for 10.0.0.1"),
        (None, "Monthly quota of 10000 requests has been reached"),
    ],
    CONDITIONAL: [
        ("expired", "it waited too long in 'orders'"),
        (
            "org.springframework.web.client.HttpServerErrorException$ServiceUnavailable",
            "503 Service Unavailable: [no body]",
        ),
        ("org.springframework.web.client.HttpServerErrorException", "500 Internal Server Error"),
        (
            "io.github.resilience4j.circuitbreaker.CallNotPermittedException",
            "CircuitBreaker 'stock' is OPEN and does not permit further calls",
        ),
        ("Polly.CircuitBreaker.BrokenCircuitException", "The circuit is now open and is not allowing calls."),
        (
            "System.Net.Http.HttpRequestException",
            "Response status code does not indicate success: 503 (Service Unavailable).",
        ),
        ("requests.exceptions.HTTPError", "502 Server Error: Bad Gateway for url: https://api.example.com/v1"),
        (None, "rpc error: code = Unavailable desc = connection error"),
        (None, "unexpected HTTP status: 500 Internal Server Error"),
        ("AxiosError", "Request failed with status code 503"),
        ("org.postgresql.util.PSQLException", "FATAL: sorry, too many clients already"),
        ("java.lang.OutOfMemoryError", "Java heap space"),
        ("OSError", "[Errno 28] No space left on device"),
        (None, "upstream connect error or disconnect/reset before headers. reset reason: overflow"),
    ],
    MANUAL: [
        ("rejected", "a consumer of 'orders' rejected it"),
        ("delivery_limit", "it was delivered too often from 'orders'"),
        ("dead-letter", None),
        (None, None),
        ("", ""),
        ("java.lang.NullPointerException", 'Cannot invoke "shop.Order.id()" because "order" is null'),
        ("java.lang.IllegalArgumentException", "quantity must be positive"),
        ("jakarta.validation.ConstraintViolationException", "take.order.amount: must be greater than 0"),
        (
            "com.fasterxml.jackson.databind.exc.MismatchedInputException",
            "Cannot deserialize value of type `int` from String",
        ),
        ("org.springframework.amqp.support.converter.MessageConversionException", "Failed to convert Message content"),
        ("org.springframework.dao.DataIntegrityViolationException", "could not execute statement"),
        ("org.springframework.web.client.HttpClientErrorException$NotFound", "404 Not Found: [no body]"),
        ("org.springframework.web.client.HttpClientErrorException", "422 Unprocessable Entity"),
        ("org.springframework.web.client.HttpClientErrorException$Unauthorized", "401 Unauthorized"),
        ("System.ArgumentNullException", "Value cannot be null. (Parameter 'order')"),
        ("System.NullReferenceException", "Object reference not set to an instance of an object."),
        ("System.Text.Json.JsonException", "The JSON value could not be converted to System.Int32."),
        ("FluentValidation.ValidationException", "Validation failed: -- Amount: 'Amount' must be greater than '0'."),
        ("System.UnauthorizedAccessException", "Attempted to perform an unauthorized operation."),
        ("Microsoft.Data.SqlClient.SqlException", "Login failed for user 'shop'."),
        ("Npgsql.PostgresException", '23505: duplicate key value violates unique constraint "orders_pkey"'),
        ("System.Net.Http.HttpRequestException", "Response status code does not indicate success: 404 (Not Found)."),
        ("KeyError", "'timeout'"),
        ("json.decoder.JSONDecodeError", "Expecting value: line 1 column 1 (char 0)"),
        ("pydantic_core._pydantic_core.ValidationError", "1 validation error for Order"),
        ("psycopg2.errors.UniqueViolation", "duplicate key value violates unique constraint"),
        ("requests.exceptions.HTTPError", "400 Client Error: Bad Request for url: https://api.example.com/v1"),
        ("stripe.error.CardError", "Your card was declined."),
        (None, "rpc error: code = InvalidArgument desc = amount"),
        (None, "rpc error: code = PermissionDenied desc = no"),
        (None, "json: cannot unmarshal string into Go struct field Order.amount of type int"),
        (None, "x509: certificate has expired or is not yet valid"),
        ("TypeError", "Cannot read properties of undefined (reading 'timeout')"),
        ("SyntaxError", "Unexpected token < in JSON at position 0"),
        ("ZodError", '[{"code":"invalid_type","expected":"number"}]'),
        ("AxiosError", "Request failed with status code 404"),
        (
            "botocore.exceptions.ClientError",
            "An error occurred (AccessDeniedException) when calling the PutItem operation",
        ),
        (None, "ACCESS_REFUSED - Login was refused using authentication mechanism PLAIN"),
        # What misleads: the words of one kind in a failure of another.
        ("ValueError", "timeout must be a positive number"),
        ("Error", "the field 'timeout' is required"),
        ("Error", "Invalid value for 'connectTimeout': read timed out setting must be an integer"),
        (None, 'unknown field "rateLimit" in request'),
        (None, "quota must be numeric"),
        (None, "validation failed: connection reset flag missing"),
        ("Error", "Order 503 was cancelled by the customer"),
        ("Error", "the amount of 429 EUR exceeds the balance"),
        (None, "customer 17 chose no timeout"),
        ("shop.PaymentRejectedException", "the bank said no"),
        ("shop.OrderExpiredException", "the order is too old"),
        (None, "payment declined: connection with a known fraud ring"),
    ],
}
CASES = [(strategy, *case) for strategy, cases in REALISTIC.items() for case in cases]


@pytest.mark.parametrize(("strategy", "failure_type", "message"), CASES)
def test_the_default_rules_know_what_services_write(
    strategy: Strategy, failure_type: str | None, message: str | None
) -> None:
    told = explain(failure_type, message, DEFAULT_RULES)
    assert classify(failure_type, message, DEFAULT_RULES)[0] is strategy, told


def test_no_default_rule_is_idle() -> None:
    used = {classify(failure_type, message, DEFAULT_RULES)[1] for _, failure_type, message in CASES}
    assert used == {rule.name for rule in DEFAULT_RULES} | {UNKNOWN}


def test_the_default_rules_have_names_and_positions_of_their_own() -> None:
    assert len({rule.name for rule in DEFAULT_RULES}) == len(DEFAULT_RULES)
    assert [rule.position for rule in DEFAULT_RULES] == sorted({rule.position for rule in DEFAULT_RULES})
    assert UNKNOWN not in {rule.name for rule in DEFAULT_RULES}


def rule(position: int, on: On, pattern: str, strategy: Strategy = IMMEDIATE, name: str = "") -> Rule:
    return Rule(position, name or f"rule-{position}", on, pattern, strategy)


def test_the_lowest_position_decides_and_of_equal_ones_the_name() -> None:
    later, earlier = rule(20, On.ANY, "stock", MANUAL), rule(10, On.ANY, "stock", SCHEDULED)
    assert classify("x", "no stock", [later, earlier]) == (SCHEDULED, "rule-10")
    tied = [rule(1, On.ANY, "stock", MANUAL, "b"), rule(1, On.ANY, "stock", CONDITIONAL, "a")]
    assert classify("x", "no stock", tied) == (CONDITIONAL, "a")


def test_a_rule_looks_where_it_is_told_to() -> None:
    on_type, on_text, on_any = (rule(1, on, "Stock") for on in On)
    assert explain("NoStock", "empty", [on_type]) == (Match(on_type, On.TYPE, "Stock"),)
    assert not explain("Empty", "no stock", [on_type])
    assert not explain("NoStock", "empty", [on_text])
    assert explain("Empty", "no stock", [on_text]) == (Match(on_text, On.TEXT, "stock"),)
    assert explain("NoStock", "no stock", [on_any]) == (Match(on_any, On.TYPE, "Stock"),)
    assert explain("Empty", "no stock", [on_any]) == (Match(on_any, On.TEXT, "stock"),)


def test_explain_names_every_rule_that_would_match_and_by_what() -> None:
    told = explain("java.net.SocketTimeoutException", "the timeout must be positive", DEFAULT_RULES)
    assert [(match.rule.name, match.on, match.found) for match in told] == [
        ("time-out-type", On.TYPE, "Timeout"),
        ("validation", On.TEXT, "must be"),
    ]


def test_a_text_beyond_its_first_2048_characters_says_nothing() -> None:
    assert classify(None, "x" * 2040 + "stock", [rule(1, On.TEXT, "stock")])[0] is IMMEDIATE
    assert classify(None, "x" * 2044 + "stock", [rule(1, On.TEXT, "stock")]) == (MANUAL, UNKNOWN)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "(a|aa)+$",
        "(a|a?)+$",
        "(.*a){12}",
        "a.*b.*c",
        "(?:x+x+)+y",
        r"(\w+\s?)*$",
        "(?:(?:a{1,9}){1,9})b",
        "(a|b|ab)(a|b|ab)(a|b|ab)(a|b|ab)(a|b|ab)(a|b|ab)(a|b|ab)(a|b|ab)(a|b|ab)",
        r"(a)\1",
        "(?P<name>a)",
        "(?<=a)b",
        "(?i)a",
        "(?>a)b",
        "(",
        "a)",
        "[a",
        "[[a]",
        "*",
        "a{9999999999999}",
        "a*",
        "",
        "|",
        "(?:timeout)?",
        "a" * 1001,
        "(" * 25 + "a" + ")" * 25,
    ],
)
def test_a_pattern_that_could_run_away_or_matches_everything_is_refused(pattern: str) -> None:
    with pytest.raises(RuleRefused) as refused:
        compiled(pattern)
    assert (refused.value.exit_code, refused.value.pattern) == (2, pattern)
    assert refused.value.why in str(refused.value)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("stock", "no STOCK left"),
        ("read.{0,40}timed out", "Read of socket timed out"),
        ("no .*stock", "no more pens in stock"),
        (r"\bERR-\d{3,5}\b", "err-1234"),
        (r"[]\]]+x|[^]]y", "]]x"),
        (r"(?:open|closed)? ?circuit", "open circuit"),
        (r"^stock(?! is fine)", "stock is low"),
        (r"a{2}b{1,9}?c{,3}d", "aabbccd"),
        (r"a{b}|\{\}", "a{b}"),
        (r"\\d|\.|\(", "a.b"),
    ],
)
def test_ordinary_patterns_are_taken(pattern: str, text: str) -> None:
    assert compiled(pattern).search(text)


PIECES = st.sampled_from(
    [
        "a",
        "b",
        ".",
        r"\w",
        "[ab]",
        "[^a]",
        "(",
        "(?:",
        ")",
        "|",
        "*",
        "+",
        "?",
        "{2}",
        "{0,40}",
        "{1,}",
        "^",
        "$",
        r"\b",
    ]
)


@given(st.one_of(st.text(max_size=30), st.lists(PIECES, max_size=14).map("".join)))
def test_whatever_pattern_is_taken_is_quick_on_any_text(pattern: str) -> None:
    try:
        expression = compiled(pattern)
    except RuleRefused:
        return
    for text in ("a" * 2048, "ab" * 1024, "b" * 2047 + "!"):
        started = time.process_time()
        expression.search(text)
        assert time.process_time() - started < 2


@given(st.lists(PIECES, max_size=14).map("".join))
def test_what_is_taken_is_what_python_means_by_it(pattern: str) -> None:
    try:
        expression = compiled(pattern)
    except RuleRefused:
        return
    assert expression == re.compile(pattern, re.IGNORECASE)


@pytest.mark.parametrize(
    "text", ["a" * 1_000_000, "timeout " * 125_000, "connection to " * 70_000, "quota exceed " * 70_000]
)
def test_a_message_of_a_megabyte_is_classified_at_once(text: str) -> None:
    started = time.process_time()
    classify(text, text, DEFAULT_RULES)
    assert time.process_time() - started < 1


@given(st.one_of(st.none(), st.text()), st.one_of(st.none(), st.text()))
def test_every_failure_gets_a_strategy(failure_type: str | None, message: str | None) -> None:
    strategy, name = classify(failure_type, message, DEFAULT_RULES)
    matches = explain(failure_type, message, DEFAULT_RULES)
    assert (strategy, name) == ((matches[0].rule.strategy, matches[0].rule.name) if matches else (MANUAL, UNKNOWN))
