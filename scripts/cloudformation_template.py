"""Makes template.yaml of serverless.yml: the same resources as plain CloudFormation, for the AWS CLI alone.

`python scripts/cloudformation_template.py > template.yaml`. It packages with a value for each parameter that is found
again in the result, and puts a parameter of CloudFormation into each of those places.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from scripts.lambda_parameters import declared

ROOT: Final = Path(__file__).resolve().parents[1]
STAGE: Final = "prod"
PACKAGE: Final = "build/aws/dlqbatch-python3.12-arm64.zip"
"""What scripts/package makes; `aws cloudformation package` puts it into a bucket."""
HEADER: Final = """\
# Made from serverless.yml and deploy/aws by scripts/cloudformation_template.py; change those.
# docs/aws.md says how it is deployed, and what its parameters are.
"""
MARKS: Final[dict[str, str | int]] = {
    "memory": 1111,
    "drainMemory": 1112,
    "retainMemory": 1113,
    "drainMessages": "1114",  # a variable of the environment, which is text
    "drainConcurrency": 1115,
    "depth": 1116,
    "failingMinutes": 1117,
    "logRetentionDays": 3288,  # one that CloudWatch Logs knows
    "virtualHost": "mark-virtual-host",
    "retryQueue": "mark-retry-queue",
    "logLevel": "mark-log-level",
    "coldStorageKey": "mark-cold-storage-key",
}
"""By parameter of serverless.yml, a value that stands nowhere else. Others are parameters of its template already."""
OF_SERVERLESS: Final = ("ServerlessDeploymentBucket", "ServerlessDeploymentBucketPolicy")


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.write(render(Path(folder)))
    return 0


def render(folder: Path) -> str:
    """The text of template.yaml; the folder is for the files of osls."""
    package = folder / Path(PACKAGE).name
    package.write_bytes(b"PK\5\6" + bytes(18))  # an empty zip file: what is in it does not matter
    given = {"packages": folder, "check": "true", **MARKS}
    options = [f"--param={name}={value}" for name, value in given.items()]
    command = ["package", "--package", str(folder / STAGE), "--stage", STAGE, *options]
    script = '. scripts/setup.sh; prepare_serverless || exit 4; exec "$serverless" "$@" >&2'
    subprocess.run(["bash", "-c", script, "osls", *command], cwd=ROOT, check=True)
    rendered = json.loads((folder / STAGE / "cloudformation-template-update-stack.json").read_text("utf-8"))
    return HEADER + yaml.safe_dump(plain(rendered), sort_keys=False, width=120, allow_unicode=True)


def plain(rendered: dict[str, Any]) -> dict[str, Any]:
    """What osls has rendered, without the bucket that only osls needs, and with a parameter for each mark."""
    resources = {name: one for name, one in rendered["Resources"].items() if name not in OF_SERVERLESS}
    for one in resources.values():
        if one["Type"] == "AWS::Lambda::Function":
            one["Properties"]["Code"] = PACKAGE
    resources["CheckEventsRuleSchedule1"]["Properties"]["State"] = {"Fn::If": ["ChecksRun", "ENABLED", "DISABLED"]}
    outputs = {name: one for name, one in rendered["Outputs"].items() if not name.startswith("Serverless")}
    return {
        "AWSTemplateFormatVersion": rendered["AWSTemplateFormatVersion"],
        "Description": "dlqbatch on AWS Lambda: its jobs on their schedules, alarms, roles and cold storage",
        "Metadata": {"cfn-lint": {"config": {"ignore_checks": ["W3002"]}}},  # `aws cloudformation package` comes first
        "Parameters": parameters(rendered["Parameters"]),
        "Conditions": rendered["Conditions"] | {"ChecksRun": {"Fn::Equals": [{"Ref": "Check"}, "true"]}},
        "Resources": marked(resources),
        "Outputs": outputs,
    }


def parameters(of_serverless: dict[str, Any]) -> dict[str, Any]:
    defaults = declared(STAGE, (ROOT / "serverless.yml").read_text("utf-8"))
    found: dict[str, Any] = {"Stage": {"Type": "String", "Default": STAGE, "AllowedPattern": "[a-z][a-z0-9-]{0,19}"}}
    found |= of_serverless
    for name, mark in MARKS.items():
        kind = {"Type": "Number" if isinstance(mark, int) else "String"}
        found[parameter(name)] = found.get(parameter(name), kind) | {"Default": defaults[name]}
    found["Check"] = {"Type": "String", "Default": defaults["check"], "AllowedValues": ["true", "false"]}
    return found


def parameter(name: str) -> str:
    return name[0].upper() + name[1:]


def marked(value: Any) -> Any:
    """The same with references in the places of the marks and of the stage."""
    by_mark = {str(mark): parameter(name) for name, mark in MARKS.items()} | {STAGE: "Stage"}
    if isinstance(value, dict):
        if isinstance(value.get("Fn::Sub"), str):
            return {"Fn::Sub": with_stage(value["Fn::Sub"])}
        return {name: marked(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [marked(inner) for inner in value]
    if isinstance(value, (str, int)) and str(value) in by_mark:
        return {"Ref": by_mark[str(value)]}
    if isinstance(value, str) and with_stage(value) != value:
        return {"Fn::Sub": with_stage(value)}
    return value


def with_stage(text: str) -> str:
    return re.sub(rf"(?<=dlqbatch[- ]){STAGE}\b", "${Stage}", text)


if __name__ == "__main__":
    sys.exit(main())
