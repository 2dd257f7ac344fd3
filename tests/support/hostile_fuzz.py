"""The fuzzer: seeded mutations of what each target understands, or atheris, which looks at what they reach.

    python tests/support/hostile_fuzz.py [--atheris] [--runs N] [--seconds S] [--seed N] [TARGET …]

An input that breaks a target is written to tests/hostile_corpus/TARGET, where the tests find it from then on.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import secrets
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from hostile import Hostile  # noqa: E402  (found by the path set above)
from hostile_targets import TARGETS, seeds  # noqa: E402  (the same)

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

CORPUS = ROOT / "tests" / "hostile_corpus"
_POOL = 64
_LARGEST = 4096


def known(target: str) -> list[bytes]:
    """Inputs that once broke a target, or were hard to come by."""
    return [file.read_bytes() for file in sorted((CORPUS / target).glob("*"))]


def inputs(target: str, seed: int) -> Iterator[bytes]:
    """For ever; the same for the same seed."""
    hostile = Hostile(seed)
    source, pool = seeds(target, hostile), known(target)
    while True:
        if len(pool) < _POOL:
            pool.append(next(source))
        else:
            pool[hostile.random.randrange(_POOL)] = next(source)
        yield pool[-1]
        for _ in range(20):
            yield mutated(hostile.random.choice(pool), hostile.random.choice(pool), hostile.random)


def mutated(data: bytes, other: bytes, dice: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 4))):
        at = dice.randrange(len(changed) + 1)
        kind = dice.randrange(7)
        if kind == 0:
            changed[at : at + 1] = dice.randbytes(1)
        elif kind == 1:
            changed[at : at + dice.randrange(9)] = b""
        elif kind == 2:
            changed[at:at] = dice.choice(_PIECES)
        elif kind == 3:
            # A length that lies.
            changed[at : at + 4] = dice.choice((0, 1, 255, 2**16, 2**31, 2**32 - 1, len(data))).to_bytes(4, "big")
        elif kind == 4:
            start = dice.randrange(len(other) + 1)
            changed[at:at] = other[start : start + dice.randrange(200)]
        elif kind == 5 and at < len(changed):
            changed[at] ^= 1 << dice.randrange(8)
        else:
            del changed[at:]
    return bytes(changed[:_LARGEST])


_PIECES = (
    b"\0",
    b"\xff",
    b"S",
    b"F\0\0\0\0",
    b"A\0\0\0\1V",
    b"\xce",
    b"\\",
    b"\n",
    b".",
    b"#",
    b"*",
    b'"',
    b"[",
    b"{",
    b"9" * 30,
)


def loop(target: str, seed: int, runs: int, seconds: float) -> tuple[int, list[bytes]]:
    """How many inputs, and those that broke it."""
    broken: list[bytes] = []
    ends = time.monotonic() + seconds
    for number, data in enumerate(inputs(target, seed)):
        if number >= runs or (number % 50 == 0 and time.monotonic() > ends):
            return number, broken
        try:
            TARGETS[target](data)
        except Exception:  # noqa: BLE001  (that is what it looks for)
            traceback.print_exc()
            broken.append(data)
            if len(broken) > 4:
                return number + 1, broken
    raise AssertionError


def keep(target: str, data: bytes) -> Path:
    file = CORPUS / target / hashlib.sha256(data).hexdigest()[:16]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    return file


def with_atheris(target: str, seed: int, runs: int, seconds: float) -> int:
    """libFuzzer ends its process, so that each target gets one; its exit code."""
    with tempfile.TemporaryDirectory() as learned:
        # What it learns is for this run alone; the corpus is for what broke.
        for number, data in zip(range(200), seeds(target, Hostile(seed)), strict=False):
            (Path(learned) / f"seed-{number}").write_bytes(data[:_LARGEST])
        options = [f"-runs={runs}", f"-max_total_time={seconds:.0f}", f"-seed={seed or 1}", f"-max_len={_LARGEST}"]
        options += ["-rss_limit_mb=1024", "-timeout=20", "-print_final_stats=1", "-verbosity=0"]
        (CORPUS / target).mkdir(parents=True, exist_ok=True)
        options.append(f"-artifact_prefix={CORPUS / target}/")
        command = [sys.executable, "-c", _UNDER_ATHERIS.format(target=target), *options, learned, str(CORPUS / target)]
        environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}"}
        return subprocess.run(command, env=environment, check=False).returncode


_UNDER_ATHERIS = """
import atheris, sys
with atheris.instrument_imports(include=["dlqbatch"]):
    import hostile_targets
atheris.Setup(sys.argv, hostile_targets.TARGETS[{target!r}])
atheris.Fuzz()
"""


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--runs", type=int, default=1_000_000, help="inputs in all, shared by the targets")
    parser.add_argument("--seconds", type=float, default=1800.0, help="in all, whatever --runs says")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--atheris", action="store_true", help="by coverage; needs requirements-fuzz.txt")
    given = parser.parse_args()
    if unknown := set(given.targets) - TARGETS.keys():
        parser.error(f"no such target: {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    targets = given.targets or list(TARGETS)
    seed = secrets.randbits(31) if given.seed is None else given.seed
    runs, seconds = -(-given.runs // len(targets)), given.seconds / len(targets)
    say(f"seed {seed}: {runs:,} inputs, or {seconds:.0f} s, for each of {', '.join(targets)}")
    failed, total = 0, 0
    for target in targets:
        began = time.monotonic()
        if given.atheris:
            failed += with_atheris(target, seed, runs, seconds) != 0
            continue
        number, broken = loop(target, seed, runs, seconds)
        total += number
        failed += bool(broken)
        for data in broken:
            say(f"{target}: broken by {keep(target, data).relative_to(ROOT)}: {data[:200]!r}")
        say(f"{target:12} {number:>10,} inputs in {time.monotonic() - began:6.1f} s, {len(broken)} broke it")
    say(f"seed {seed}: {failed} of {len(targets)} targets broken" + ("" if given.atheris else f", {total:,} inputs"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
