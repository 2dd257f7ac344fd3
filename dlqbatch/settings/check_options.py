"""The options of the check: which queues, how many failures, and where what has failed too often goes."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from dlqbatch.settings.declaring import Options, option
from dlqbatch.settings.values import free_name, queue_name, words

Name = Annotated[str, AfterValidator(queue_name)]


class CheckOptions(Options):
    """Part of `Settings`."""

    check_queues: Annotated[tuple[Name, ...], BeforeValidator(words)] = option(
        (),
        "The queues that `check` looks through; `*` stands for any text and needs the management API.",
        "names or wildcards with commas between them",
    )
    check_max_deaths: int = option(
        3, "A message that has failed more often than this is moved by `check`.", "a whole number of at least 0", ge=0
    )
    check_target: Annotated[str, AfterValidator(free_name)] = option(
        "permanent_failure_queue",
        "Where `check` moves to, declared if it is missing. Each `*` in it stands for what the source's `*` stood for: "
        "from `dlq.*` to `dead.*`.",
        "a name of 1 to 200 bytes that does not begin with amq., with or without `*`",
    )
    allow_delivery_cost: bool = option(
        False,
        "Whether `check` looks through quorum queues where that can cost the messages a delivery of their limit.",
        "true or false",
    )
