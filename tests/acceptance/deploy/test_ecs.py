"""The scheduled tasks of deploy/ecs: what they start, with which settings. moto deploys no schedules."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from program import HANGS_AFTER, ROOT, Program

from dlqbatch import settings
from dlqbatch.jobs import COMMANDS
from dlqbatch.settings.store_options import Bucket

FILE = ROOT / "deploy" / "ecs" / "template.yaml"
SCHEDULED = {"drain", "ingest", "lifecycle", "monitor", "replay", "retain"}


class Loader(yaml.SafeLoader):
    """`!Ref Task` is {"Ref": "Task"}."""


def tagged(loader: Loader, name: str, node: yaml.Node) -> dict[str, Any]:
    if isinstance(node, yaml.ScalarNode):
        return {name: loader.construct_scalar(node)}
    assert isinstance(node, yaml.SequenceNode)
    return {name: loader.construct_sequence(node, deep=True)}


Loader.add_multi_constructor("!", tagged)


def test_cfn_lint_finds_nothing() -> None:
    command = [str(Path(sys.executable).with_name("cfn-lint")), str(FILE)]
    linted = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_AFTER, check=False)
    assert (linted.returncode, linted.stdout) == (0, ""), linted.stdout + linted.stderr


def test_each_job_is_started_in_a_task_that_has_its_settings() -> None:
    resources = yaml.load(FILE.read_text(), Loader)["Resources"]
    (container,) = resources["Task"]["Properties"]["ContainerDefinitions"]
    program, commands = Program({}), set()
    for schedule in (each["Properties"] for each in resources.values() if each["Type"] == "AWS::Scheduler::Schedule"):
        assert schedule["Target"]["EcsParameters"]["TaskDefinitionArn"] == {"Ref": "Task"}
        (override,) = json.loads(schedule["Target"]["Input"])["containerOverrides"]
        assert override["name"] == container["Name"]
        assert program.run(*override["command"], "--help").code == 0
        commands.add(tuple(override["command"]))
    assert commands == {tuple(COMMANDS[job]) for job in SCHEDULED}
    secrets = {each["Name"]: each["ValueFrom"] for each in container["Secrets"]}
    assert secrets == {
        f"DLQBATCH_{name.upper()}": {"Sub": f"${{Secret}}:{name}::"} for name in ("broker_url", "database_url")
    }
    always, (_, cold, _) = container["Environment"][0], container["Environment"][1]["If"]
    variables = {always["Name"]: always["Value"], cold["Name"]: cold["Value"]["Sub"].replace("${ColdStorage}", "cold")}
    addresses = {"DLQBATCH_BROKER_URL": "amqp://example.com", "DLQBATCH_DATABASE_URL": "postgresql://example.com/x"}
    loaded = settings.load({}, {"DLQBATCH_CONFIG": "/dev/null", **variables, **addresses})
    assert not loaded.warnings
    assert loaded.cold_storage == Bucket("cold", "dlqbatch")
