"""The document of the API (OpenAPI 3.1), made from the route table."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from dlqbatch import __version__
from dlqbatch.console.addresses import NAMES
from dlqbatch.console.rights import Role
from dlqbatch.console.routes import routes

if TYPE_CHECKING:
    from dlqbatch.console.app import Console
    from dlqbatch.console.gate import Route

_ERROR: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["type", "message", "exit_code"],
            "properties": {
                "type": {"type": "string"},
                "message": {"type": "string"},
                "exit_code": {"type": "integer", "description": "Of the same command on the command line."},
                "split": {"type": "object", "description": "What a filter matches, where it is not what was expected."},
                "expected": {"type": ["integer", "null"]},
            },
        }
    },
}
_FAILURES: Final = {
    "401": "Nobody is logged in.",
    "403": "The role, the right or the database login does not allow it; nothing was done.",
    "404": "There is no such thing.",
    "409": "Not in the present state; nothing was done.",
    "413": "The request is too large.",
    "422": "It makes no sense; nothing was done.",
    "503": "The database or the broker is away.",
}
_NAME: Final = re.compile(r"\{(\w+)\}")
_PATTERNS: Final = {
    "id": "^[1-9][0-9]{0,17}$",
    "hash": "^[0-9a-f]{8,16}$",
    "name": "^A-[1-9][0-9]{0,9}$",
    "group": "^[0-9a-f]{1,16}$",
}


def document_of(console: Console) -> dict[str, object]:
    paths: dict[str, dict[str, object]] = {}
    for route in routes():
        if route.is_api:
            paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "dlqbatch", "version": __version__, "description": "What the command line prints as JSON."},
        "servers": [{"url": console.url or console.prefix or "/"}],
        "security": [{"token": []}],
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Error": _ERROR},
        },
        "paths": paths,
    }


def _operation(route: Route) -> dict[str, object]:
    done = "201" if route.changes else "200"
    operation: dict[str, object] = {
        "summary": route.what,
        "operationId": re.sub(r"\W+", "_", route.what),
        "description": f"Takes the role {(route.needs or Role.READER).word}"
        + (" and the right to reveal." if route.reveals else "."),
        "parameters": [*_path(route), *_query(route)],
        "responses": {
            done: {"description": "Done.", "content": {"application/json": {"schema": {"type": "object"}}}},
            **({} if route.changes else {"304": {"description": "As the ETag says."}}),
            **{code: _failure(why) for code, why in _FAILURES.items()},
        },
    }
    if route.takes is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": route.takes}}}
    return operation


def _failure(why: str) -> dict[str, object]:
    return {"description": why, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}


def _path(route: Route) -> list[dict[str, object]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "pattern": _PATTERNS[name]}}
        for name in _NAME.findall(route.path)
    ]


def _query(route: Route) -> list[dict[str, object]]:
    names = [each for word in route.asks for each in (NAMES if word == "filter" else (word,))]
    found: list[dict[str, object]] = [
        {"name": name, "in": "query", "schema": {"type": "string", "maxLength": 400}} for name in names
    ]
    if route.changes:
        found += [
            {
                "name": name,
                "in": "header",
                "schema": {"type": "string", "pattern": "^[!-~]{1,64}$"},
                "description": what,
            }
            for name, what in (
                ("Idempotency-Key", "A request that is sent again with it is not done again."),
                (
                    "Idempotency-Instance",
                    "Of a request that is sent again: the process that was asked first, as /me says.",
                ),
            )
        ]
    return found
