"""What an API answers, as the values that a function in this process would have returned."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import datetime
from enum import Enum
from functools import cache
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

_Kind = TypeVar("_Kind")
_READERS: Final[dict[type, Callable[[Any], Any]]] = {
    datetime: datetime.fromisoformat,
    bytes: bytes.fromhex,
    float: float,
}


def decode(kind: type[_Kind], value: Any) -> _Kind:
    """The value of this type that `json_ready` has written; ValueError, TypeError or KeyError if it is none.

    What a newer console adds is left out; what an older one does not send has its default.
    """
    found: _Kind = _decode(kind, value)
    return found


def _decode(kind: Any, value: Any) -> Any:
    origin = get_origin(kind)
    if kind in {Any, object} or origin is Literal:
        return value
    if origin in {Union, types.UnionType}:
        return (
            None if value is None else _decode(next(each for each in get_args(kind) if each is not type(None)), value)
        )
    if origin is tuple:
        return _tuple(get_args(kind), value)
    if origin in {list, Sequence}:
        found = [_decode(get_args(kind)[0], each) for each in _listed(value)]
        return found if origin is list else tuple(found)
    if origin in {dict, Mapping}:
        of, to = get_args(kind)
        return {_decode(of, name): _decode(to, each) for name, each in value.items()}
    return _plain(kind, value)


def _plain(kind: Any, value: Any) -> Any:
    if is_dataclass(kind):
        return _made(kind, [field.name for field in fields(kind)], value)
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        named = dict(zip(kind._fields, value, strict=False)) if isinstance(value, list) else value
        return _made(kind, kind._fields, named)
    if kind in _READERS:
        return _READERS[kind](value)
    if issubclass(kind, Enum):
        return kind(value)
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def _made(kind: Any, names: Sequence[str], value: Mapping[str, Any]) -> Any:
    hints = _hints(kind)
    return kind(**{name: _decode(hints[name], value[name]) for name in names if name in value})


def _tuple(kinds: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    if kinds[-1] is Ellipsis:
        return tuple(_decode(kinds[0], each) for each in _listed(value))
    return tuple(_decode(kind, each) for kind, each in zip(kinds, value, strict=True))


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is no list")
    return value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
