"""A small function must be able to retain what a broker was able to hold: memory, as the kernel counts it."""

from __future__ import annotations

import os
import random
import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from dead_rows import add, row, store_at
from program import ROOT, Program
from sqlalchemy import update

from dlqbatch.store.engine import writing
from dlqbatch.store.tables import MESSAGES

if TYPE_CHECKING:
    from pathlib import Path

MB = 1024 * 1024
BUCKET = "cold-copies"

# The kernel's own peak of the whole process, in kB.
MEASURED = """
import sys
sys.path.insert(0, {root!r})
from handler import handler
report = handler({{"job": "retain", "max_messages": int(sys.argv[1])}})
assert report["outcome"] == "ok", report
with open("/proc/self/status") as status:
    peak = next(line for line in status if line.startswith("VmHWM"))
print(report["counts"]["archived"], peak.split()[1])
"""


@pytest.fixture
def cold(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "cold")
    aws: dict[str, str] = request.getfixturevalue("aws")
    place: Any = {"LocationConstraint": aws["AWS_DEFAULT_REGION"]}
    boto3.client("s3").create_bucket(Bucket=BUCKET, CreateBucketConfiguration=place)
    return f"s3://{BUCKET}"


@pytest.mark.parametrize("cold", ["folder", "bucket"], indirect=True)
@pytest.mark.parametrize(
    ("number", "size", "most"), [(1, 24 * MB, 4.5), (400, 96 * 1024, 1.5)], ids=["one-large", "many"]
)
def test_the_memory_of_a_retain_is_known_from_the_largest_part(
    database_url: str, cold: str, number: int, size: int, most: float
) -> None:
    """Over what a retain of next to nothing takes; `most` is of all bodies together, as docs/retention.md has it."""
    seed = int.from_bytes(os.urandom(4))
    print(f"seed {seed}")  # noqa: T201 - pytest shows it when the test fails
    random_bytes = random.Random(seed).randbytes
    engine = store_at(database_url)
    (small,) = add(engine, row(body=b"small"), at=datetime.now(UTC) - timedelta(days=101))
    at = datetime.now(UTC) - timedelta(days=100)
    large = [add(engine, row(body=random_bytes(size)), at=at)[0] for _ in range(number)]
    with writing(engine) as connection:
        connection.execute(update(MESSAGES).where(MESSAGES.c.id.in_((small, *large))).values(status="failed"))
    given = {"database_url": database_url, "cold_storage": cold, "no_proxy": "127.0.0.1"}
    program = Program(given, (sys.executable, "-c", MEASURED.format(root=str(ROOT))))
    peaks = []
    for limit, expected in ((1, 1), (5000, number)):
        archived, peak = program.run(str(limit)).out.split()
        assert int(archived) == expected
        peaks.append(int(peak) * 1024)
    taken = peaks[1] - peaks[0]
    assert taken < most * number * size, f"{taken / MB:.0f} MiB, {taken / (number * size):.2f} times the bodies"
