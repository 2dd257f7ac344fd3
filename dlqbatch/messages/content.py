"""Properties, headers and body of a message as a person sees them: unpacked, and masked unless they are revealed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dlqbatch.amqp.packed import Unpacked, unpack
from dlqbatch.amqp.readable import BodyForm, Readable, body_form, body_lines, readable
from dlqbatch.logs import masking


@dataclass(frozen=True, slots=True)
class ShownContent:
    readable: Readable
    unpacked: Unpacked
    """The body to be read, with how it was packed."""
    is_masked: bool
    """What is shown is not all that is there: something is hidden, or the body is not the bytes that are stored."""
    form: BodyForm

    def body_lines(self) -> Iterator[str]:
        return body_lines(self.unpacked.body, self.form)

    @property
    def packing(self) -> str:
        """How a person is told what was unpacked; empty if nothing was."""
        if not self.unpacked.packings:
            return ""
        how = "the head of it unpacked" if not self.unpacked.is_whole else "unpacked"
        return f", {how} from {' in '.join(reversed(self.unpacked.packings))}"


def shown_content(properties: bytes, body: bytes, *, is_revealed: bool = False) -> ShownContent:
    """The rules of masking see what was unpacked: whoever could unpack it himself would read the rest."""
    held = readable(properties)
    unpacked = unpack(body, held.properties.get("content_encoding"))
    if is_revealed:
        return ShownContent(held, unpacked, is_masked=False, form=body_form(unpacked.body))
    rules = masking()
    shown = unpacked._replace(body=rules.body(unpacked.body, unpacked.encoding))
    hidden = Readable(rules.fields(held.properties), rules.fields(held.headers), held.is_whole)
    is_masked = (shown.body, hidden) != (body, held)
    return ShownContent(hidden, shown, is_masked, body_form(shown.body))
