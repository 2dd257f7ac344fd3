"""What masking hides, what it leaves, and that no input makes it take long."""

from __future__ import annotations

import base64
import gzip
import json
import pickle
import string
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted_secrets import PLAIN, leaks

from dlqbatch.amqp import json_path
from dlqbatch.amqp.masking import LONGEST, MASK, Masking, is_card_number
from dlqbatch.amqp.readable import body_form
from dlqbatch.settings.content_options import check_pattern

RULES = Masking()
CARD = "4111 1111 1111 1111"


def hidden(body: bytes, rules: Masking = RULES, encoding: object = None) -> bytes:
    masked = rules.body(body, encoding)
    assert not leaks(masked), masked
    assert MASK.encode() in masked
    return masked


@pytest.mark.parametrize(
    "name",
    [
        *("password", "Passwd", "db_password", "pwd", "passphrase", "authorization", "Proxy-Authorization", "Cookie"),
        *("Set-Cookie", "token", "accessToken", "refresh_token", "client_secret", "X-Api-Key", "apiKey", "private-key"),
        *("aws_secret_access_key", "credentials", "sessionId", "cardNumber", "card_number", "cvv", "CVC2", "cardCvv"),
        *("pin", "otp", "ssn", "pan", "jwt"),
    ],
)
def test_a_secret_is_hidden_by_its_name_wherever_it_stands(name: str) -> None:
    for secret in (PLAIN, f"{PLAIN} {PLAIN}", [PLAIN], {"a": {"b": [PLAIN]}}, f'quoted "{PLAIN}'):
        for document in ({name: secret, "kept": 1}, [{"x": {name: secret}}], {"x": json.dumps({name: secret})}):
            masked = hidden(json.dumps(document).encode())
            json.loads(masked)
        assert not leaks(json.dumps(RULES.fields({name: secret, "x": {name: secret}})))
    assert json.loads(RULES.body(json.dumps({name: None, "kept": 1.50}).encode())) == {name: None, "kept": 1.5}


@pytest.mark.parametrize(
    "name", ["passenger", "order", "keys", "pinned", "spanish", "authors", "option", "idempotency-key", "company"]
)
def test_a_name_that_only_resembles_one_is_shown(name: str) -> None:
    assert RULES.body(json.dumps({name: "x"}).encode()) == json.dumps({name: "x"}).encode()
    assert RULES.fields({name: "x"}) == {name: "x"}


@pytest.mark.parametrize(
    "text",
    [
        f"password={PLAIN}",
        f"user=u&password={PLAIN}&x=1",
        f"failed for {{'password': '{PLAIN} {PLAIN}'}}",
        f'failed for {{"password" : "{PLAIN} \\" {PLAIN}"}}',
        f'said {{\\"password\\": \\"{PLAIN} {PLAIN}\\"}}',
        f"<order><password>{PLAIN} {PLAIN}</password></order>",
        f'<a:AccessToken type="x">{PLAIN}</a:AccessToken>',
        f"Authorization: Basic {PLAIN}\nnext",
        f"Authorization: AWS4-HMAC-SHA256 Credential={PLAIN}, Signature={PLAIN}",
        f"Cookie: session={PLAIN}; csrf={PLAIN}",
        f"bearer {PLAIN}{PLAIN}",
        f"amqp://u:{PLAIN}@host/v",
        f"eyJ{PLAIN}.{PLAIN}.{PLAIN}",
        f"sk_live_{PLAIN}",
        f"password%3D{PLAIN}",
        "payload=" + quote(json.dumps({"password": PLAIN})),
        "payload=" + quote_plus(quote_plus(json.dumps({"a": 1, "pin": PLAIN}))) + "&b=1",
        json.dumps({"x": "Basic " + base64.b64encode(f"u:{PLAIN}".encode()).decode()}),
        json.dumps({"x": base64.urlsafe_b64encode(json.dumps({"password": PLAIN, "a": "?>~"}).encode()).decode()}),
        base64.urlsafe_b64encode(json.dumps({"token": PLAIN}).encode()).decode().rstrip("="),
        base64.encodebytes(json.dumps({"filler": "x" * 80, "password": PLAIN}).encode()).decode(),
        f"-----BEGIN RSA PRIVATE KEY-----\n{PLAIN}\n-----END RSA PRIVATE KEY-----",
        f'{{"password": "{PLAIN} {PLAIN}',
        f'{{"a": [{{"token": {{"x": "{PLAIN}"',
        base64.b64encode(json.dumps({"password": PLAIN}).encode()).decode(),
        json.dumps({"body": base64.b64encode(json.dumps({"password": PLAIN}).encode()).decode()}),
        json.dumps({"body": base64.b64encode(gzip.compress(PLAIN.encode(), mtime=0)).decode()}),
        '{"p\\u0061ssword": "' + PLAIN + '"}',
        json.dumps({"a": json.dumps({"b": json.dumps({"c": json.dumps({"d": json.dumps({"token": PLAIN})})})})}),
    ],
)
def test_a_secret_is_hidden_in_a_text(text: str) -> None:
    hidden(text.encode())
    if not text.startswith("{") and "eyJ" not in text[:3]:
        assert not leaks(RULES.text(text))


def test_a_secret_is_hidden_in_bytes_that_are_no_text() -> None:
    hidden(b"\xff\x00password=" + PLAIN.encode())
    hidden(pickle.dumps({"password": f"{PLAIN} {PLAIN}"}))
    hidden(b"\x81\xa8password\xab" + PLAIN.encode())
    hidden(json.dumps({"password": PLAIN}).encode("utf-16"))
    hidden(json.dumps({"password": PLAIN}).encode("utf-16-le"))
    hidden(gzip.compress(PLAIN.encode()))
    hidden(PLAIN.encode(), encoding="br")
    assert RULES.body(b"\xff\x00order 7") == b"\xff\x00order 7"
    assert RULES.body(b"x", "utf-8") == b"x"


@pytest.mark.parametrize(
    "text",
    [
        *("4111 1111 1111 1111", "4111111111111111", "5500-0000-0000-0004", "340000000000009", "6011000000000004"),
        *("2223 0031 2200 3222", "card 4111 1111 1111 1111 12 EUR", "4111111111111111EUR", "4000 4111 1111 1111 1111"),
    ],
)
def test_a_card_number_is_hidden_in_whatever_it_stands(text: str) -> None:
    def is_shown(masked: str) -> bool:
        return "1111 1111" in masked or "11111111" in masked or masked == text

    assert not is_shown(RULES.text(text))
    assert not is_shown(RULES.body(json.dumps({"note": f"paid by {text}"}).encode()).decode())
    number = int("".join(filter(str.isdigit, text)))
    if is_card_number(str(number)):
        assert json.loads(RULES.body(json.dumps({"n": number}).encode())) == {"n": MASK}
        assert RULES.fields({"n": number}) == {"n": MASK}


def test_what_is_no_card_number_is_shown() -> None:
    for text in ("4111 1111 1111 1112", "1730000000000", "order 12345678901234567890", "+49 4111 111 111", "0.4111"):
        assert RULES.text(text) == text
    assert RULES.text("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11") == "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"


@given(st.text("0123456789", min_size=12, max_size=18), st.sampled_from("3456"))
def test_a_number_with_a_right_check_digit_is_hidden(rest: str, first: str) -> None:
    for check in string.digits:
        number = first + rest[:-1] + check
        if is_card_number(number):
            assert RULES.text(f"a {number} b") == f"a {MASK} b"


def test_a_byte_order_mark_before_a_document_hides_no_secret_from_the_rules() -> None:
    body = "\ufeff" + json.dumps({"pin": 1234, "customer": {"iban": "x"}})
    masked = json.loads(Masking(paths=("$.customer.iban",)).body(body.encode()).decode("utf-8-sig"))
    assert masked == {"pin": MASK, "customer": {"iban": MASK}}


def test_settings_add_headers_paths_and_patterns_and_can_show_a_name() -> None:
    rules = Masking(
        ("x-customer-*",), ("$.customer.iban", "$..email", "$.lines[*].note"), (r"DE\d{20}",), ("token-count",)
    )
    assert rules.fields({"X-Customer-Name": "x", "x_customer_id": 7, "token-count": 7, "other": "DE" + "1" * 20}) == {
        "X-Customer-Name": MASK,
        "x_customer_id": MASK,
        "token-count": 7,
        "other": MASK,
    }
    document = {
        "customer": {"iban": "x", "email": "x", "name": "n"},
        "iban": "shown",
        "lines": [{"note": {"a": 1}, "email": None}, {"deep": [{"email": 1}]}],
        "token_count": 3,
    }
    assert json.loads(rules.body(json.dumps(document).encode())) == {
        "customer": {"iban": MASK, "email": MASK, "name": "n"},
        "iban": "shown",
        "lines": [{"note": MASK, "email": None}, {"deep": [{"email": MASK}]}],
        "token_count": 3,
    }


@pytest.mark.parametrize(
    "pattern", ["(", "a*", "a+", "(a|b){2}", "x{2,}", "x?", "", r"\w{1,400}\w{1,400}", "a?" * 30 + "a"]
)
def test_a_pattern_that_may_take_long_or_match_nothing_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="has '"):
        check_pattern(pattern)


def test_a_bounded_pattern_is_taken() -> None:
    for pattern in (
        r"[A-Z]{2}\d{2}[A-Z0-9]{11,30}",
        r"\w{1,64}@\w{1,64}\.[a-z]{2,10}",
        r"[*+]{2}",
        r"\+\d{3}",
        "a(?:b|c)d",
    ):
        assert check_pattern(pattern) == pattern


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(0, 1) | st.text(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.just("token"), inner, max_size=4)
    ),
    max_leaves=20,
)


def plain_reading(value: object) -> object:
    """The built-in names, read without any of the program's parsing."""
    if isinstance(value, dict):
        return {
            name: MASK if RULES.is_secret(name) and inner not in (None, "") else plain_reading(inner)
            for name, inner in value.items()
        }
    if isinstance(value, list):
        return [plain_reading(inner) for inner in value]
    return value


@given(JSON.filter(lambda value: isinstance(value, dict | list)), st.sampled_from([None, 2]))
def test_all_but_the_secrets_of_a_document_stays_as_it_was_written(document: object, indent: int | None) -> None:
    text = json.dumps(document, indent=indent, ensure_ascii=False)
    try:
        body = text.encode()
    except UnicodeEncodeError:
        return
    if "\0" in text:
        return
    masked = RULES.body(body)
    assert json.loads(masked) == plain_reading(document)
    assert body_form(masked) in ("json", body_form(body))
    if plain_reading(document) == document:
        assert masked == body


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace")))
def test_anything_can_be_masked_and_what_is_masked_stays_so(body: bytes) -> None:
    assert RULES.body(RULES.body(body)) == RULES.body(body)


@given(
    st.text(string.ascii_letters + "\"'{}[]:=,\\<> \n", max_size=60), st.text(string.ascii_letters + " '", max_size=20)
)
def test_a_secret_is_hidden_whatever_stands_around_it_in_valid_json(before: str, after: str) -> None:
    hidden(json.dumps([before, {before: after, "password": PLAIN}, after]).encode())


BIG = 2 * LONGEST
HOSTILE = {
    "names": b"token" * (BIG // 5),
    "pairs": b"pass=" * (BIG // 5),
    "open quotes": b'pass="\\' * (BIG // 7),
    "single quotes": b"pass='\\" * (BIG // 7),
    "elements": b"<tokentokentoken" * (BIG // 16),
    "jwt": b"-eyJ" * (BIG // 4),
    "digits": b"4" * BIG,
    "groups": b"4111 " * (BIG // 5),
    "deep": b"[" * BIG,
    "deep objects": b'{"a":' * (BIG // 5),
    "quotes": b'{"a":"' + b'\\"' * (BIG // 2),
    "members": b'{"a":' + b'"token":1,' * (BIG // 10),
    "keys": b"-----BEGIN PRIVATE KEY-----" * (BIG // 27),
    "bearer": b"bearer " * (BIG // 7),
    "spaces": b"bearer" + b" " * BIG,
    "base64": b"A" * BIG,
    "urls": b"://" * (BIG // 3),
    "at": b"://" + b"@" * BIG,
    "zeros": b"\0" * BIG,
    "no text": b"\xff" * BIG,
    "names in bytes": b"\xfftoken\x01" * (BIG // 7),
    "nested": json.dumps("[" * 100_000).encode(),
    "percent": b"%25" * (BIG // 3) + b"%22",
    "percent words": b"x%3D y" * (BIG // 6),
    "basic": b"basic " * (BIG // 6),
    "lines of base64": (b"A" * 76 + b"\n") * (BIG // 77),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.timeout(120)
def test_a_hostile_body_takes_bounded_time_and_what_was_not_looked_through_is_not_shown(name: str) -> None:
    rules = Masking(paths=("$..a.b", "$..*.c"), patterns=(r"\w{1,64}@\w{1,64}",))
    masked = rules.body(HOSTILE[name] + PLAIN.encode())
    assert len(HOSTILE[name]) < LONGEST or not leaks(masked)


@pytest.mark.parametrize(
    ("path", "steps"),
    [
        ("$.a", ("a",)),
        ("$.order.lines[0].sku", ("order", "lines", 0, "sku")),
        ("$['odd name'][\"x\"]", ("odd name", "x")),
        ("$..iban", (json_path.Wild.DEEP, "iban")),
        ("$.lines[*].*", ("lines", json_path.Wild.EVERY, json_path.Wild.EVERY)),
    ],
)
def test_a_path_is_read(path: str, steps: json_path.Path) -> None:
    assert json_path.parse(path) == steps


@pytest.mark.parametrize(
    "path", ["", "a", "$", "$.", "$..", "$.a.", "$[", "$[x]", "$.a b", "$[-1]", "$...a", "$" + ".a" * 40]
)
def test_what_is_no_path_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match=r"JSON path|whole body"):
        json_path.parse(path)


def test_values_are_found_by_a_path() -> None:
    document = {"order": {"id": 7, "lines": [{"sku": "a"}, {"sku": "b"}]}, "0": "text", "id": [8]}

    def found(path: str) -> list[object]:
        return list(json_path.values(json_path.parse(path), document))

    assert found("$.order.id") == [7]
    assert found("$.order.lines[*].sku") == ["a", "b"]
    assert found("$..sku") == ["a", "b"]
    assert sorted(map(str, found("$..id"))) == ["7", "[8]"]
    assert found("$.order.lines[1].sku") == ["b"]
    assert found("$[0]") == []
    assert found("$.nothing.at.all") == []
