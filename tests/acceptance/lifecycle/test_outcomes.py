"""Nothing is claimed of a retry that was not so: every situation at once, real consumers, jobs every few seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from outcomes.situations import NEW, OLD
from outcomes.stage import Stage, told

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("release", [OLD, NEW])
def test_nothing_false_is_claimed_and_what_is_true_is_claimed(
    release: str, broker_addresses: tuple[str, str], broker43_addresses: tuple[str, str], tmp_path: Path
) -> None:
    addresses, other = (broker_addresses, broker43_addresses)[:: 1 if release == OLD else -1]
    stage = Stage(*addresses, other[1], tmp_path, release)
    try:
        plays = stage.play(seconds=60)
    finally:
        stage.close()
    assert not [told(one) for one in plays if one.problems]
    assert len({one.situation.name for one in plays}) > 40
