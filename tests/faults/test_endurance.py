"""Half a minute of what `scripts/endurance` does for an hour: mixed load, faults, and every message looked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MINUTES = 0.5


@pytest.mark.slow
def test_under_load_and_faults_nothing_is_lost_nothing_grows_and_every_alert_fires(tmp_path: Path) -> None:
    kept = tmp_path / "result.json"
    command = [sys.executable, "-m", "endurance.run", f"--minutes={MINUTES}", "--no-restarts", f"--json={kept}"]
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "support")))
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=550, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(kept.read_text())
    assert told["problems"] == []
    assert told["messages"]["published"] > 0
    assert sum(told["faults"].values()) > 0
