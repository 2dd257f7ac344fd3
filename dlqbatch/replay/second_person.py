"""Whether a plan may be sent by this person: a large one needs a second person. Decided without I/O."""

from __future__ import annotations


def is_same(person: str, other: str) -> bool:
    """Names as people type them: `Ann` and `ann ` are one person."""
    return person.strip().casefold() == other.strip().casefold()


def why_not_alone(
    name: str, size: int, maker: str, person: str, *, is_approved: bool, most_alone: int | None
) -> str | None:
    """Why this person may not send the plan; `most_alone` is the largest plan that its maker may send alone."""
    if most_alone is None or size <= most_alone or is_approved or not is_same(person, maker):
        return None
    return (
        f"plan {name} holds {size:,} messages, and {maker} made it. Above dlqbatch.replay-approval = {most_alone:,} a "
        f"second person has to agree: somebody else runs `dlqbatch replay approve {name}`, or sends it. Nothing was "
        "moved"
    )
