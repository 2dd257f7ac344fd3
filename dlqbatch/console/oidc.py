"""The login at an OIDC provider: the authorization code flow with PKCE, by Authlib."""

from __future__ import annotations

import secrets
import time
from functools import cached_property
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import httpx2
from authlib.integrations.httpx_client import OAuth2Client
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet
from starlette.responses import RedirectResponse, Response

from dlqbatch.console.entrance import let_in, safe_place
from dlqbatch.console.gate import Refused
from dlqbatch.errors import DlqbatchError

if TYPE_CHECKING:
    from dlqbatch.console.app import Console
    from dlqbatch.console.gate import Call
    from dlqbatch.settings import Settings

BACK: Final = "/login/oidc/back"
_WITHIN: Final = 600
"""Seconds that somebody may take to log in at the provider."""
_TIMEOUT: Final = 10.0
_LEEWAY: Final = 60
_COOKIE: Final = "dlqbatch-oidc"
_ALGORITHMS: Final = ("RS256", "PS256", "ES256", "EdDSA")


class ProviderAway(DlqbatchError):
    exit_code = 4

    def __init__(self, why: str) -> None:
        super().__init__(f"the OIDC provider cannot be reached, or answers what it should not: {why}. Try again")


class Provider:
    """The provider of the settings; what it says of itself is read once, its keys again when one is not known."""

    def __init__(self, settings: Settings) -> None:
        self._issuer = (settings.console_oidc_issuer or "").rstrip("/")
        self._client_id = settings.console_oidc_client_id or ""
        secret = settings.console_oidc_client_secret
        self._secret = secret.get_secret_value() if secret is not None else None
        self._scope = settings.console_oidc_scope
        self._back = f"{settings.console_url}{BACK}"
        self._needed = (settings.console_oidc_name_claim, settings.console_oidc_groups_claim)
        self._keys: KeySet | None = None

    def start(self) -> tuple[str, dict[str, object]]:
        """The address at the provider, and what has to be remembered until somebody comes back from it."""
        verifier, nonce = secrets.token_urlsafe(48), secrets.token_urlsafe(24)
        with self._client() as client:
            place, state = client.create_authorization_url(
                self._said["authorization_endpoint"], code_verifier=verifier, nonce=nonce
            )
        return place, {"state": state, "verifier": verifier, "nonce": nonce, "ends": time.time() + _WITHIN}

    def claims(self, address: str, kept: dict[str, Any]) -> dict[str, Any]:
        """What the provider says of whoever came back with this address; its signature and its nonce are checked."""
        try:
            with self._client(state=kept["state"]) as client:
                token = client.fetch_token(
                    self._said["token_endpoint"], authorization_response=address, code_verifier=kept["verifier"]
                )
        except (httpx2.HTTPError, ValueError) as error:
            raise ProviderAway(type(error).__name__) from error
        except Exception as error:  # Authlib has an error of its own for each answer of a provider
            raise Refused(HTTPStatus.FORBIDDEN, "the OIDC provider did not confirm the login; log in again") from error
        found = self._checked(str(token.get("id_token", "")), str(kept["nonce"]))
        return self._with_userinfo(found, str(token.get("access_token", "")))

    def _with_userinfo(self, found: dict[str, Any], access_token: str) -> dict[str, Any]:
        """Many providers keep names and groups out of the ID token, and tell them to whoever has the access token."""
        place = self._said.get("userinfo_endpoint")
        if not place or not access_token or all(name in found for name in self._needed):
            return found
        more = _json(str(place), {"Authorization": f"Bearer {access_token}"})
        if not found.get("sub") or more.get("sub") != found["sub"]:
            raise Refused(HTTPStatus.FORBIDDEN, "the OIDC provider's answers are about two people; log in again")
        return {**more, **found}

    def _checked(self, token: str, nonce: str) -> dict[str, Any]:
        try:
            found = self._decoded(token)
            rules = jwt.JWTClaimsRegistry(
                leeway=_LEEWAY,
                iss={"essential": True, "value": self._issuer_said},
                aud={"essential": True, "value": self._client_id},
                exp={"essential": True},
                nonce={"essential": True, "value": nonce},
            )
            rules.validate(found)
        except (JoseError, ValueError, KeyError, TypeError) as error:
            raise Refused(
                HTTPStatus.FORBIDDEN, "the OIDC provider's answer is not to be trusted; log in again"
            ) from error
        return found

    def _decoded(self, token: str) -> dict[str, Any]:
        for again in (False, True):
            if self._keys is None or again:
                self._keys = KeySet.import_key_set({"keys": _json(self._said["jwks_uri"])["keys"]})
            try:
                return dict(jwt.decode(token, self._keys, algorithms=list(_ALGORITHMS)).claims)
            except (JoseError, ValueError):
                if again:
                    raise
        raise ValueError(token)  # pragma: no cover  (the second turn returns or raises)

    @cached_property
    def _said(self) -> dict[str, Any]:
        return _json(f"{self._issuer}/.well-known/openid-configuration")

    @property
    def _issuer_said(self) -> str:
        said = str(self._said.get("issuer", ""))
        if said.rstrip("/") != self._issuer:
            raise ValueError(said)
        return said

    def _client(self, state: str | None = None) -> Any:
        return OAuth2Client(
            self._client_id,
            self._secret,
            scope=self._scope,
            redirect_uri=self._back,
            code_challenge_method="S256",
            state=state,
            timeout=_TIMEOUT,
            token_endpoint_auth_method="client_secret_basic" if self._secret else "none",
        )


def _json(address: str, headers: dict[str, str] | None = None) -> dict[str, Any]:
    try:
        found = httpx2.get(address, headers=headers, timeout=_TIMEOUT).raise_for_status().json()
    except (httpx2.HTTPError, ValueError) as error:
        raise ProviderAway(type(error).__name__) from error
    if not isinstance(found, dict):
        raise ProviderAway("no JSON object")
    return found


def start(call: Call) -> Response:
    console = call.console
    place, kept = _provider(console).start()
    kept["next"] = safe_place(call.one("next"))
    response = RedirectResponse(place, HTTPStatus.SEE_OTHER)
    # Lax, because the way back comes from the provider's page.
    response.set_cookie(
        _COOKIE,
        console.logins.sessions.sign(kept),
        max_age=_WITHIN,
        path=f"{console.prefix}/login",
        httponly=True,
        secure=console.is_secure,
        samesite="lax",
    )
    return response


def back(call: Call) -> Response:
    console, settings = call.console, call.console.settings
    kept = console.logins.sessions.read(call.request.cookies.get(_COOKIE))
    if kept is None or "verifier" not in kept or not secrets.compare_digest(call.one("state"), str(kept["state"])):
        call.note("refused", "no login was begun here, or it is over")
        raise Refused(HTTPStatus.FORBIDDEN, "no login was begun in this browser, or it took too long; log in again")
    address = f"{settings.console_url}{BACK}?{call.request.url.query}"
    claims = _provider(console).claims(address, kept)
    name = str(claims.get(settings.console_oidc_name_claim) or claims.get("sub") or "")
    if settings.console_oidc_name_claim == "email" and claims.get("email_verified") is False:
        name = str(claims.get("sub") or "")
    groups = claims.get(settings.console_oidc_groups_claim)
    listed = [str(group) for group in groups] if isinstance(groups, list) else [str(groups)] if groups else []
    call.person = console.logins.members.person(name, listed, "oidc") if name else None
    if call.person is None:
        call.note("refused", f"{name or 'nobody'} is in no list of the settings")
        raise Refused(HTTPStatus.FORBIDDEN, f"you are logged in as {name}, who has no right here; ask for one")
    call.note("done")
    response = let_in(console, call.person, safe_place(str(kept["next"])))
    response.delete_cookie(_COOKIE, path=f"{console.prefix}/login")
    return response


def _provider(console: Console) -> Provider:
    if not console.logins.has_oidc:
        raise Refused(HTTPStatus.NOT_FOUND, "no OIDC provider is named in the settings")
    return console.provider
