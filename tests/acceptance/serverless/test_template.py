from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from program import HANGS_AFTER
from serverless_template import EVERYTHING, JOBS, ROOT, TEMPLATE, template, template_of


def test_the_template_passes_cfn_lint_at_every_stage_with_and_without_what_is_optional(
    packages: Path, tmp_path: Path
) -> None:
    """No rule is switched off."""
    for stage, parameters in (("dev", EVERYTHING), ("prod", ())):
        template(packages, stage, *parameters, output=tmp_path / stage)
    found = [folder / stage / TEMPLATE for folder in (packages, tmp_path) for stage in ("dev", "prod")]
    assert [one for one in found if not one.is_file()] == []
    command = [Path(sys.executable).with_name("cfn-lint"), *map(str, found)]
    linted = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_AFTER, check=False)
    assert (linted.returncode, linted.stdout) == (0, ""), linted.stdout + linted.stderr


def test_no_address_and_no_password_is_in_the_template(packages: Path) -> None:
    for stage in ("dev", "prod"):
        text = json.dumps(template_of(packages / stage))
        assert "amqp" not in text
        assert "postgresql" not in text
        assert "resolve:" not in text, "what CloudFormation resolves, everybody who may see the function can read"


def test_cold_storage_outlives_the_stack(packages: Path) -> None:
    resources = template_of(packages / "prod")["Resources"]
    assert resources["ColdStorage"]["DeletionPolicy"] == "Retain"
    assert resources["ColdStorage"]["UpdateReplacePolicy"] == "Retain"
    assert resources["ColdStoragePolicy"]["DeletionPolicy"] == "Retain"


def test_the_page_has_every_parameter_with_its_default_and_every_alarm() -> None:
    page = (ROOT / "docs" / "aws.md").read_text()
    table = page.partition("## Parameters\n")[2].partition("\n## ")[0]
    text = (ROOT / "serverless.yml").read_text()
    written = text.partition("  default:\n")[2].partition("\n  dev:")[0]
    parameters = dict(re.findall(r"^    (\w+): (.+?)(?: +#.*)?$", written, re.MULTILINE))
    told = dict(re.findall(r"^\| `(\w+)` \| (\S+)", table, re.MULTILINE))
    own = {"python", "architecture", "packages"}  # of scripts/package, which has options for them
    assert set(told) == set(parameters) - own
    for name, default in told.items():
        value = parameters[name].strip('"').replace("${sls:stage}", "STAGE")
        assert default.strip("`") == (value or "none"), name
    named = set(
        re.findall(r"AlarmName: \$\{self:service\}-\$\{sls:stage\}-(\S+)", (ROOT / "deploy/aws/alarms.yml").read_text())
    )
    assert named
    missing = [name for name in named if f"`{re.sub('^(' + '|'.join(JOBS) + ')-', '…-', name)}`" not in page]
    assert missing == []
