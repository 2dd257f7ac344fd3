"""A provider for logins over real HTTP: discovery, a code, a signed token; and each way in which one can lie."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import secrets
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlencode, urlsplit

from joserfc import jwt
from joserfc.jwk import RSAKey

if TYPE_CHECKING:
    from collections.abc import Iterator


class Provider:
    def __init__(self) -> None:
        self.key, self.others_key = (RSAKey.generate_key(2048, {"kid": kid}) for kid in ("one", "one"))
        self.address = ""
        self.claims: dict[str, Any] = {}
        """What the token says beside what it has to."""
        self.lies: dict[str, Any] = {}
        """Claims that a token should not have."""
        self.signs_with = self.key
        self.asked: dict[str, str] = {}
        self._codes: dict[str, dict[str, str]] = {}

    def authorize(self, place: str) -> str:
        """What a browser does at the provider: log in, and come back with a code."""
        asked = {name: values[0] for name, values in parse_qs(urlsplit(place).query).items()}
        self.asked = asked
        code = secrets.token_hex(8)
        self._codes[code] = asked
        return f"{asked['redirect_uri']}?{urlencode({'code': code, 'state': asked['state']})}"

    def token(self, form: dict[str, str]) -> tuple[int, dict[str, Any]]:
        asked = self._codes.pop(form.get("code", ""), None)
        digest = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).decode().rstrip("=")
        if asked is None or challenge != asked["code_challenge"] or form["redirect_uri"] != asked["redirect_uri"]:
            return 400, {"error": "invalid_grant"}
        now = int(time.time())
        claims = {"iss": self.address, "aud": asked["client_id"], "nonce": asked["nonce"], "iat": now, "exp": now + 60}
        signed = jwt.encode({"alg": "RS256", "kid": "one"}, {**claims, **self.claims, **self.lies}, self.signs_with)
        return 200, {"access_token": "x", "token_type": "Bearer", "id_token": signed}

    def answer(self, path: str, form: dict[str, str]) -> tuple[int, dict[str, Any]]:
        if path == "/.well-known/openid-configuration":
            return 200, {
                "issuer": self.address,
                "authorization_endpoint": f"{self.address}/authorize",
                "token_endpoint": f"{self.address}/token",
                "jwks_uri": f"{self.address}/keys",
            }
        if path == "/keys":
            return 200, {"keys": [self.key.as_dict(private=False)]}
        return self.token(form) if path == "/token" else (404, {})


@contextlib.contextmanager
def provider() -> Iterator[Provider]:
    found = Provider()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(*found.answer(self.path, {}))

        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers["Content-Length"])).decode()
            self._send(*found.answer(self.path, {name: values[0] for name, values in parse_qs(text).items()}))

        def _send(self, status: int, content: dict[str, Any]) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the name it has there)
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.address = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
