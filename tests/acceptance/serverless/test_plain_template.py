"""template.yaml: made from serverless.yml, and what it deploys with the AWS CLI alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from program import HANGS_AFTER
from serverless_template import EVERYTHING, JOBS, NEXT_TO_NOTHING, ROOT, Account, Stack, template_of

from scripts import cloudformation_template

FILE = ROOT / "template.yaml"
OF_DEV = ("logRetentionDays=7", "drainConcurrency=2", "secret=dlqbatch/dev")
"""What `dev` has of its own in serverless.yml; the defaults of the file are those of `prod`."""


def parameters(stage: str, given: tuple[str, ...]) -> dict[str, str]:
    """As the page says that parameters of serverless.yml are written for the AWS CLI."""
    named = dict(one.split("=", 1) for one in given)
    defaults = {name: str(one["Default"]) for name, one in yaml.safe_load(FILE.read_text())["Parameters"].items()}
    overrides = {"SecretName" if name == "secret" else name[0].upper() + name[1:]: named[name] for name in named}
    assert set(overrides) <= set(defaults)
    return defaults | overrides | {"Stage": stage}


def test_it_is_what_serverless_yml_makes(tmp_path: Path) -> None:
    assert FILE.read_text() == cloudformation_template.render(tmp_path)


def test_cfn_lint_finds_nothing() -> None:
    command = [str(Path(sys.executable).with_name("cfn-lint")), str(FILE)]
    linted = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_AFTER, check=False)
    assert (linted.returncode, linted.stdout) == (0, ""), linted.stdout + linted.stderr


@pytest.mark.parametrize(("stage", "given"), [("prod", EVERYTHING), ("dev", (*OF_DEV, *NEXT_TO_NOTHING))])
def test_with_the_same_parameters_it_has_the_resources_of_serverless_yml(
    packages: Path, stage: str, given: tuple[str, ...]
) -> None:
    rendered = template_of(packages / stage)
    wanted = {name: one for name, one in rendered["Resources"].items() if "ServerlessDeployment" not in name}
    values = {name: value for name, value in parameters(stage, given).items() if name not in rendered["Parameters"]}
    values["ColdStorageKey"] = rendered["Parameters"]["ColdStorageKey"]["Default"]
    for one in wanted.values():
        if one["Type"] == "AWS::Lambda::Function":
            one["Properties"]["Code"] = cloudformation_template.PACKAGE
    assert filled(yaml.safe_load(FILE.read_text())["Resources"], values) == filled(wanted, values)


def filled(value: Any, values: dict[str, str]) -> Any:
    """With the values in the places of their parameters, and every number as text, as CloudFormation takes both."""
    match value:
        case {"Ref": name} if name in values:
            return values[name]
        case {"Fn::Sub": str(text)} if "${Stage}" in text:
            whole = text.replace("${Stage}", values["Stage"])
            return {"Fn::Sub": whole} if "${" in whole else whole
        case {"Fn::If": ["ChecksRun", held, otherwise]}:
            return held if values["Check"] == "true" else otherwise
        case dict():
            return {name: filled(inner, values) for name, inner in value.items()}
        case list():
            return [filled(inner, values) for inner in value]
    return str(value) if isinstance(value, int) else value


@pytest.fixture(scope="module")
def plain(account: Account, zipped: Path) -> Stack:
    """The stage `plain` with every parameter given, deployed as the AWS CLI does it."""
    storage, formation = account.client("s3"), account.client("cloudformation")
    region = {"LocationConstraint": storage.meta.region_name}
    storage.create_bucket(Bucket="code", CreateBucketConfiguration=region)
    storage.upload_file(str(zipped), "code", zipped.name)
    stack = Stack(account, "dlqbatch-plain", yaml.safe_load(FILE.read_text()))
    for function in stack.properties("AWS::Lambda::Function"):
        function["Code"] = {"S3Bucket": "code", "S3Key": zipped.name}  # as `aws cloudformation package`
    body = json.dumps(stack.without_the_rest(stack.template))
    storage.put_object(Bucket="code", Key="template", Body=body.encode())
    formation.create_stack(
        StackName=stack.name,
        TemplateURL=f"https://code.s3.{storage.meta.region_name}.amazonaws.com/template",
        Parameters=[
            {"ParameterKey": name, "ParameterValue": value} for name, value in parameters("plain", EVERYTHING).items()
        ],
        Capabilities=["CAPABILITY_IAM"],
    )
    return stack


def test_what_it_deploys_is_what_serverless_yml_deploys(plain: Stack, prod: Stack) -> None:
    for job in JOBS:
        assert read_back(plain, job) == read_back(prod, job)


KEPT = ("Handler", "Runtime", "MemorySize", "Timeout", "Environment", "VpcConfig", "CodeSha256", "Architectures")


def read_back(stack: Stack, job: str) -> dict[str, Any]:
    """What the account knows of a function, its concurrency, its log and its schedule, without the stack's name."""
    functions, name = stack.client("lambda"), stack.function(job)
    known = functions.get_function(FunctionName=name)["Configuration"]
    (log,) = stack.client("logs").describe_log_groups(logGroupNamePrefix=f"/aws/lambda/{name}")["logGroups"]
    rules = {
        (rule["ScheduleExpression"], rule["State"], target["Input"])
        for rule in stack.client("events").list_rules()["Rules"]
        for target in stack.client("events").list_targets_by_rule(Rule=rule["Name"])["Targets"]
        if target["Arn"] == known["FunctionArn"]
    }
    found = {
        **{one: known[one] for one in KEPT},
        "reserved": functions.get_function_concurrency(FunctionName=name)["ReservedConcurrentExecutions"],
        "days": log["retentionInDays"],
        "rules": sorted(rules),
    }
    own = {output: value for output, value in stack.outputs.items() if not output.startswith("Is")}
    text = json.dumps(found).replace(stack.name, "STACK")
    for output in ("AlertTopic", "ColdStorageBucket"):
        text = text.replace(own[output].replace(stack.name, "STACK"), output)
    read: dict[str, Any] = json.loads(text)
    return read
