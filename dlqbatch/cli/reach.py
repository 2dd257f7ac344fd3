"""Where the functions behind a command work: on the database of the settings, or at a console elsewhere (--remote).

A command calls its functions through this, and prints what they return. So it is written once, and a console's answer
is printed as the database's is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from dlqbatch.errors import SettingsError
from dlqbatch.settings import Settings

if TYPE_CHECKING:  # they need SQLAlchemy, which a help page does not
    from sqlalchemy import Engine

    from dlqbatch.messages.actions import MessageActions
    from dlqbatch.remote.client import RemoteConsole

_Given = ParamSpec("_Given")
_Found = TypeVar("_Found")


class StatedActor(str):
    """A name that somebody has given with --actor."""

    __slots__ = ()


class Reach:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        if settings.remote is not None and settings.scope is not None:
            raise SettingsError("a console has a scope of its own: leave --scope (dlqbatch.scope) out with --remote")

    def here(self, instead: str) -> Settings:
        """The settings of a command that does not go by --remote; SettingsError if it is to."""
        from dlqbatch.cli.run import refuse_remote

        refuse_remote(self.settings, instead)
        return self.settings

    @cached_property
    def _engine(self) -> Engine:
        from dlqbatch.store.access import store_for

        return store_for(self.settings)

    @cached_property
    def _messages(self) -> MessageActions:
        from dlqbatch.messages.actions import MessageActions

        return MessageActions(self._engine)

    @cached_property
    def _console(self) -> RemoteConsole:
        from dlqbatch.remote.client import RemoteConsole

        return RemoteConsole.of(self.settings)

    def store(
        self, function: Callable[Concatenate[Engine, _Given], _Found], *given: _Given.args, **named: _Given.kwargs
    ) -> _Found:
        """Call a function of the database."""
        if self.settings.remote is not None:
            found: _Found = self._asked(function, *given, **named)
            return found
        return function(self._engine, *given, **named)

    def messages(
        self,
        function: Callable[Concatenate[MessageActions, _Given], _Found],
        *given: _Given.args,
        **named: _Given.kwargs,
    ) -> _Found:
        """Call a method of `MessageActions`."""
        if self.settings.remote is not None:
            found: _Found = self._asked(function, *given, **named)
            return found
        return function(self._messages, *given, **named)

    def run(
        self, function: Callable[Concatenate[Settings, _Given], _Found], *given: _Given.args, **named: _Given.kwargs
    ) -> _Found:
        """Call a function that connects by the settings."""
        if self.settings.remote is not None:
            found: _Found = self._asked(function, *given, **named)
            return found
        return function(self.settings, *given, **named)

    def _asked(self, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        from dlqbatch.remote.client import OtherVersion
        from dlqbatch.remote.requests import REQUESTS

        people = [named.get("actor"), *(getattr(each, "actor", None) for each in (*given, *named.values()))]
        if any(isinstance(each, StatedActor) for each in people):
            raise SettingsError("by --remote the token says who it is: leave --actor out. Nothing was done")
        request = REQUESTS[f"{function.__module__}.{function.__qualname__}"]
        try:
            return request(self._console, *given, **named)
        except (KeyError, TypeError, ValueError) as error:
            raise OtherVersion(self._console.url, f"answers what is not understood ({type(error).__name__})") from error
