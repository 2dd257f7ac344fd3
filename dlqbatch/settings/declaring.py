"""How options are declared: each with its default, what it means, and what it must be."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Options(BaseModel):
    """Some of the options; `Settings` is all of them together."""

    # Of the classes only Settings is ever made, so that nothing else is built; a model costs some milliseconds.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, defer_build=True)


def option(default: Any, meaning: str, must_be: str, *, default_text: str | None = None, **bounds: Any) -> Any:
    """`must_be` is ready to follow 'it must be'; `default_text` is the default as a person would write it."""
    extra: dict[str, Any] = {"must_be": must_be, "default_text": default_text}
    return Field(default, description=meaning, json_schema_extra=extra, **bounds)
