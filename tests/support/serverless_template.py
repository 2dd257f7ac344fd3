"""serverless.yml as a CloudFormation template, and that template deployed into an account on a private server.

It is deployed as `osls deploy` does it: a stack with the bucket for the code, the code into it, then the rest.
The server's CloudFormation does not know every type. What it leaves out is made through the API of its own service,
with the very properties of the template; CloudFormation still resolves them, as outputs that are added for that.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import boto3
from program import HANGS_AFTER

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
REGION = "eu-central-1"
TEMPLATE = "cloudformation-template-update-stack.json"
JOBS = ("drain", "ingest", "lifecycle", "replay", "monitor", "retain", "check")
MINUTELY = JOBS[:5]
SECRET_KEY = "arn:aws:kms:eu-central-1:123456789012:key/11111111-1111-1111-1111-111111111111"
DATABASE_SECRET = "arn:aws:secretsmanager:eu-central-1:123456789012:secret:rds!db-1-AbCdEf"
COLD_KEY = "arn:aws:kms:eu-central-1:123456789012:key/22222222-2222-2222-2222-222222222222"
EVERYTHING = (
    "secret=payments/dlqbatch",
    f"secretKey={SECRET_KEY}",
    f"databaseSecret={DATABASE_SECRET}",
    f"coldStorageKey={COLD_KEY}",
    "broker=orders-mq",
    "virtualHost=shop",
    "depth=500",
    "subnets=subnet-0a1b2c3d,subnet-4e5f6a7b",
    "securityGroups=sg-0123abcd",
    "alertEmail=on-call@example.com",
    "check=true",
)
NEXT_TO_NOTHING = ("metricsNamespace=off",)
_FIRST_TEMPLATE = "cloudformation-template-create-stack.json"


def package(output: Path, stage: str, *parameters: str) -> str:
    """As people call it; what it says. The template is in a folder of the stage's name, the zip file beside that."""
    given = [f"--param={parameter}" for parameter in parameters]
    command = [str(ROOT / "scripts" / "package"), "--output", str(output), "--stage", stage, *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_AFTER, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def template(packages: Path, stage: str, *parameters: str, output: Path | None = None) -> None:
    """The same without making the zip file again."""
    given = [f"--param={parameter}" for parameter in (f"packages={packages}", *parameters)]
    command = ["package", "--package", str(output or packages / stage), "--stage", stage, *given]
    # The script knows its path.
    script = '. scripts/setup.sh; exec "$serverless" "$@"'
    done = subprocess.run(
        ["bash", "-c", script, "serverless", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANGS_AFTER,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def template_of(folder: Path, name: str = TEMPLATE) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / name).read_text())
    return read


def is_expression(value: object) -> bool:
    return isinstance(value, dict) and len(value) == 1 and next(iter(value)).startswith(("Ref", "Fn::"))


def expressions(value: Any) -> Iterator[Any]:
    if is_expression(value):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from expressions(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from expressions(inner)


def output_name(expression: object) -> str:
    return "Asked" + hashlib.sha256(json.dumps(expression, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Account:
    """On that server; emptied when it is made."""

    address: str
    _clients: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with urlopen(Request(f"{self.address}/moto-api/reset", method="POST"), timeout=HANGS_AFTER):
            pass

    def client(self, service: str) -> Any:
        if service not in self._clients:
            keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing"}
            self._clients[service] = boto3.client(service, endpoint_url=self.address, region_name=REGION, **keys)
        return self._clients[service]

    def deploy(self, folder: Path, code: Path) -> Stack:
        stack = Stack(self, f"dlqbatch-{folder.name}", template_of(folder))
        formation, storage = self.client("cloudformation"), self.client("s3")
        first = stack.with_conditions(stack.without_the_rest(template_of(folder, _FIRST_TEMPLATE)))
        # The defaults, because moto splits a list only where it is given.
        given = [
            {"ParameterKey": name, "ParameterValue": one["Default"]}
            for name, one in stack.template["Parameters"].items()
        ]
        formation.create_stack(StackName=stack.name, TemplateBody=json.dumps(first), Parameters=given)
        bucket = stack.physical("ServerlessDeploymentBucket")
        (key,) = {one["Code"]["S3Key"] for one in stack.properties("AWS::Lambda::Function")}
        storage.upload_file(str(code), bucket, key)
        whole = stack.without_nothing(stack.with_outputs(stack.without_the_rest(stack.template)))
        storage.put_object(Bucket=bucket, Key="template", Body=json.dumps(whole).encode())
        formation.update_stack(
            StackName=stack.name,
            TemplateURL=f"https://{bucket}.s3.{REGION}.amazonaws.com/template",
            Parameters=given,
            Capabilities=["CAPABILITY_IAM", "CAPABILITY_NAMED_IAM"],
        )
        stack.add_the_rest()
        return stack


@dataclass(frozen=True)
class Stack:
    account: Account
    name: str
    template: dict[str, Any]

    def client(self, service: str) -> Any:
        return self.account.client(service)

    def function(self, job: str) -> str:
        return f"{self.name}-{job}"

    def physical(self, logical: str) -> str:
        found = self.client("cloudformation").describe_stack_resource(StackName=self.name, LogicalResourceId=logical)
        return str(found["StackResourceDetail"]["PhysicalResourceId"])

    @property
    def outputs(self) -> dict[str, str]:
        (found,) = self.client("cloudformation").describe_stacks(StackName=self.name)["Stacks"]
        return {output["OutputKey"]: output["OutputValue"] for output in found["Outputs"]}

    @cached_property
    def conditions(self) -> dict[str, bool]:
        """As CloudFormation decided them for the first template."""
        outputs = self.outputs
        return {name: outputs[f"Is{name}"] == "true" for name in self.template["Conditions"]}

    def properties(self, kind: str) -> list[dict[str, Any]]:
        return [one["Properties"] for one in self.template["Resources"].values() if one["Type"] == kind]

    def without_the_rest(self, template: dict[str, Any]) -> dict[str, Any]:
        kept = {name: one for name, one in template["Resources"].items() if not self._is_left_out(one)}
        return {**template, "Resources": kept}

    def with_outputs(self, template: dict[str, Any]) -> dict[str, Any]:
        wanted = [one["Properties"] for one in self._rest.values()]
        wanted += [role["ManagedPolicyArns"] for role in self.properties("AWS::IAM::Role")]
        asked = {
            output_name(expression): {"Value": expression}
            for expression in expressions(wanted)
            if self._alarm_of(expression) is None
        }
        return {**template, "Outputs": {**template["Outputs"], **asked}}

    def with_conditions(self, template: dict[str, Any]) -> dict[str, Any]:
        asked = {name: self.template[name] for name in ("Parameters", "Conditions")}
        told = {f"Is{name}": {"Value": {"Fn::If": [name, "true", "false"]}} for name in asked["Conditions"]}
        return {**template, **asked, "Outputs": {**template["Outputs"], **told}}

    def without_nothing(self, value: Any) -> Any:
        """Items of lists that CloudFormation leaves out; moto leaves a null in their place."""
        if isinstance(value, dict):
            return {name: self.without_nothing(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [self.without_nothing(inner) for inner in value if not self._is_nothing(inner)]
        return value

    def _is_nothing(self, value: Any) -> bool:
        if not (isinstance(value, dict) and "Fn::If" in value):
            return False
        condition, held, otherwise = value["Fn::If"]
        return bool((held if self.conditions[condition] else otherwise) == {"Ref": "AWS::NoValue"})

    def add_the_rest(self) -> None:
        # Permissions last: one of them speaks of an alarm.
        outputs = self.outputs
        for one in sorted(self._rest.values(), key=lambda one: one["Type"] == "AWS::Lambda::Permission"):
            if self.conditions.get(one.get("Condition"), True):
                self._make(one["Type"], self._resolved(one["Properties"], outputs))
        for name, one in self.template["Resources"].items():
            if one["Type"] == "AWS::IAM::Role":
                self._finish_role(self.physical(name), self._resolved(one["Properties"]["ManagedPolicyArns"], outputs))
        self._finish_cold_storage(self.template["Resources"]["ColdStorage"]["Properties"])

    @property
    def _rest(self) -> dict[str, Any]:
        return {name: one for name, one in self.template["Resources"].items() if self._is_left_out(one)}

    def _is_left_out(self, resource: dict[str, Any]) -> bool:
        """That is: moto does not know the type, or it is about a resource of which moto does not know the type."""
        unknown = {
            "AWS::CloudWatch::Alarm",
            "AWS::Lambda::EventInvokeConfig",
            "AWS::S3::BucketPolicy",
            "AWS::SNS::Subscription",
            "AWS::SNS::TopicPolicy",
        }
        return resource["Type"] in unknown or any(map(self._alarm_of, expressions(resource.get("Properties", {}))))

    def _alarm_of(self, expression: Any) -> str | None:
        """The alarm whose ARN it is."""
        logical = expression.get("Fn::GetAtt", [None])[0]
        found = self.template["Resources"].get(logical, {})
        return str(found["Properties"]["AlarmName"]) if found.get("Type") == "AWS::CloudWatch::Alarm" else None

    def _resolved(self, value: Any, outputs: dict[str, str]) -> Any:
        if is_expression(value):
            alarm = self._alarm_of(value)
            if alarm is None:
                return outputs[output_name(value)]
            (found,) = self.client("cloudwatch").describe_alarms(AlarmNames=[alarm])["MetricAlarms"]
            return found["AlarmArn"]
        if isinstance(value, dict):
            return {name: self._resolved(inner, outputs) for name, inner in value.items()}
        return [self._resolved(inner, outputs) for inner in value] if isinstance(value, list) else value

    def _make(self, kind: str, given: dict[str, Any]) -> None:
        match kind:
            case "AWS::CloudWatch::Alarm":
                # What came by --param is text, which CloudFormation takes for a number where it wants one.
                numbers = {"Threshold": float(given["Threshold"])}
                self.client("cloudwatch").put_metric_alarm(**given | numbers)
            case "AWS::Lambda::EventInvokeConfig":
                self.client("lambda").put_function_event_invoke_config(**given)
            case "AWS::Lambda::Permission":
                self.client("lambda").add_permission(**given, StatementId="alarm")
            case "AWS::S3::BucketPolicy":
                policy = json.dumps(given["PolicyDocument"])
                self.client("s3").put_bucket_policy(Bucket=given["Bucket"], Policy=policy)
            case "AWS::SNS::Subscription":
                self.client("sns").subscribe(**given)
            case "AWS::SNS::TopicPolicy":
                for topic in given["Topics"]:
                    policy = json.dumps(given["PolicyDocument"])
                    self.client("sns").set_topic_attributes(
                        TopicArn=topic, AttributeName="Policy", AttributeValue=policy
                    )
            case _:
                raise AssertionError(f"nothing here makes a {kind}")

    def _finish_role(self, role: str, policies: list[str]) -> None:
        """Of a role, moto's CloudFormation makes no attachments."""
        for policy in policies:
            self.client("iam").attach_role_policy(RoleName=role, PolicyArn=policy)

    def _finish_cold_storage(self, given: dict[str, Any]) -> None:
        """Of a bucket, moto's CloudFormation sets the encryption only."""
        storage, bucket = self.client("s3"), self.physical("ColdStorage")
        storage.put_public_access_block(
            Bucket=bucket, PublicAccessBlockConfiguration=given["PublicAccessBlockConfiguration"]
        )
        storage.put_bucket_ownership_controls(Bucket=bucket, OwnershipControls=given["OwnershipControls"])
        storage.put_bucket_versioning(Bucket=bucket, VersioningConfiguration=given["VersioningConfiguration"])
        rules = [as_api_rule(rule) for rule in given["LifecycleConfiguration"]["Rules"]]
        storage.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": rules})


def as_lambda(task: Path, program: str, **variables: str) -> Any:
    """Only what is in the package can be imported: -S leaves out everything that is installed."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    environment = {**kept, "PYTHONWARNINGS": "error", "AWS_LAMBDA_FUNCTION_NAME": "dlqbatch", **variables}
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        cwd=task,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANGS_AFTER,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def document(policy: Any) -> dict[str, Any]:
    """A policy as it is read back: some of moto's services answer with its text, one of them as Python writes it."""
    if isinstance(policy, str):
        policy = ast.literal_eval(policy) if policy.startswith("{'") else json.loads(policy)
    read: dict[str, Any] = policy
    return read


def as_api_rule(rule: dict[str, Any]) -> dict[str, Any]:
    """CloudFormation and S3 spell these differently."""
    moves = [
        {"Days": move["TransitionInDays"], "StorageClass": move["StorageClass"]} for move in rule.get("Transitions", [])
    ]
    others = {name: value for name, value in rule.items() if name not in {"Id", "Transitions"}}
    return {"ID": rule["Id"], "Filter": {"Prefix": ""}, **others} | ({"Transitions": moves} if moves else {})
