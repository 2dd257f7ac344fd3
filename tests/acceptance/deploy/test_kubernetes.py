"""The manifests in deploy/kubernetes, held against published schemas and against the program and image they name."""

from __future__ import annotations

import json
import re
import shutil
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import javaproperties
import kubernetes_validate
import pytest
import yaml
from program import ROOT, Program
from published_schemas import keda_problems, kustomized, prometheus_operator_problems

from dlqbatch import settings
from dlqbatch.console.routes import routes
from dlqbatch.jobs import COMMANDS

if TYPE_CHECKING:
    from pathlib import Path

FOLDER = ROOT / "deploy" / "kubernetes"
DOCUMENTS: list[tuple[str, dict[str, Any]]] = [
    (file.name, document)
    for file in sorted(FOLDER.rglob("*.yaml"))
    if file.name != "kustomization.yaml"
    for document in yaml.safe_load_all(file.read_text())
]
OVERLAYS = sorted(file.parent.name for file in FOLDER.glob("*/kustomization.yaml"))
"""What `kubectl apply -k` takes; `installation` is a part of each of them."""
OVERLAYS.remove("installation")
OLDEST, NEWEST = "1.27", kubernetes_validate.latest_version()  # before 1.27 a CronJob had no time zone
# KEDA gives its triggers no schema; these are the fields of the rabbitmq trigger that its documentation names.
TRIGGER = {
    *("host", "queueName", "mode", "value", "activationValue", "protocol", "vhostName", "queueLength", "hostFromEnv"),
    *("usernameFromEnv", "passwordFromEnv", "unsafeSsl", "tls", "useRegex", "pageSize", "operation", "metricName"),
    *("timeout", "excludeUnacknowledged", "workloadIdentityResource"),
}


def named(kind: str) -> dict[str, dict[str, Any]]:
    return {document["metadata"]["name"]: document for _, document in DOCUMENTS if document["kind"] == kind}


def inner_spec(document: dict[str, Any]) -> dict[str, Any]:
    """The specification that holds the pod template, wherever its kind has it."""
    spec: dict[str, Any] = document.get("spec", {})
    return spec.get("jobTemplate", spec).get("spec") or spec.get("jobTargetRef") or spec


def pod_of(document: dict[str, Any]) -> dict[str, Any] | None:
    return document if document["kind"] == "Pod" else inner_spec(document).get("template")


PODS = {document["metadata"]["name"]: pod for _, document in DOCUMENTS if (pod := pod_of(document))}
ARGUMENTS = {name: pod["spec"]["containers"][0].get("args") for name, pod in PODS.items()}
(CONFIG,), (SECRET,) = named("ConfigMap").values(), named("Secret").values()


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_manifest_is_what_kubernetes_understands_down_to_the_last_field(version: str) -> None:
    for file, document in DOCUMENTS:
        assert problems(document, version) == [], (file, document["kind"], version)


def problems(document: dict[str, Any], version: str = NEWEST) -> list[str]:
    """What Kubernetes, KEDA or the Prometheus operator would refuse."""
    if document["apiVersion"].startswith("keda.sh/"):
        return keda_problems(document)
    if document["apiVersion"].startswith("monitoring.coreos.com/"):
        return prometheus_operator_problems(document)
    try:
        kubernetes_validate.validate(document, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{error.message} at {list(error.path)}"]
    return []


@pytest.mark.parametrize("folder", OVERLAYS)
def test_kustomize_makes_objects_that_are_valid_in_one_namespace_and_of_one_image(folder: str) -> None:
    made = kustomized(FOLDER / folder)
    (installation,) = yaml.safe_load_all((FOLDER / "installation" / "kustomization.yaml").read_text())
    (image,) = installation["images"]
    for document in made:
        assert problems(document) == []
        if folder != "base":
            assert document["metadata"]["namespace"] == installation["namespace"]
            pod = pod_of(document)
            if pod is not None:
                assert pod["spec"]["containers"][0]["image"] == f"{image['newName']}:{image['newTag']}"
    written = {document["metadata"]["name"] for file, document in DOCUMENTS if (FOLDER / folder / file).exists()}
    assert {document["metadata"]["name"] for document in made} >= written


def test_the_example_of_a_cloud_identity_reaches_the_account_that_retain_runs_as(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "kubernetes")
    file = tmp_path / "kubernetes" / "installation" / "kustomization.yaml"
    file.write_text(re.sub(r"^#(?=patches|  )", "", file.read_text(), flags=re.MULTILINE))
    for folder in ("cronjobs", "schedule"):
        made = kustomized(tmp_path / "kubernetes" / folder)
        accounts = {each["metadata"]["name"]: each for each in made if each["kind"] == "ServiceAccount"}
        assert "eks.amazonaws.com/role-arn" in accounts["dlqbatch-retain"]["metadata"]["annotations"]
        assert "annotations" not in accounts["dlqbatch"]["metadata"]
        assert all(problems(document) == [] for document in made)
    users = {name for name, pod in PODS.items() if pod["spec"]["serviceAccountName"] == "dlqbatch-retain"}
    assert users == {"dlqbatch-retain", "dlqbatch-schedule"}
    assert {pod["spec"]["serviceAccountName"] for pod in PODS.values()} == set(accounts)


def test_the_network_policies_let_in_what_the_pods_serve_and_nothing_else() -> None:
    policies = named("NetworkPolicy")
    assert policies["dlqbatch"]["spec"]["ingress"] == []
    for name, component in (("dlqbatch-metrics", "schedule"), ("dlqbatch-console", "console")):
        labels = PODS[f"dlqbatch-{component}"]["metadata"]["labels"]
        spec = policies[name]["spec"]
        assert spec["podSelector"]["matchLabels"] == labels
        (rule,) = spec["ingress"]
        served = PODS[f"dlqbatch-{component}"]["spec"]["containers"][0]["ports"]
        assert [port["port"] for port in rule["ports"]] == [port["containerPort"] for port in served]
    for pod in PODS.values():
        everything = policies["dlqbatch"]["spec"]["podSelector"]["matchLabels"].items()
        assert everything <= pod["metadata"]["labels"].items()
    reached = {port["port"] for rule in policies["dlqbatch"]["spec"]["egress"] for port in rule["ports"]}
    addresses = yaml.safe_load((FOLDER / "secret.example.yaml").read_text().replace("  # DLQBATCH_", "  DLQBATCH_"))
    for address in addresses["stringData"].values():
        if "://" in address:
            assert (urlsplit(address).port or 443) in reached


def test_prometheus_operator_gets_the_metrics_port_and_the_same_alerts() -> None:
    (monitor,), (rule,) = named("PodMonitor").values(), named("PrometheusRule").values()
    pod = PODS["dlqbatch-schedule"]
    assert monitor["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == pod["spec"]["containers"][0]["ports"][0]["name"]
    assert rule["spec"] == yaml.safe_load((ROOT / "deploy" / "prometheus-rules.yml").read_text())
    broken = json.loads(json.dumps(rule))
    broken["spec"]["groups"][0]["rules"][0]["expr"] = [1]
    broken["spec"]["unheard"] = 1
    assert len(prometheus_operator_problems(broken)) == 2


def test_the_pods_of_a_disruption_budget_are_those_of_the_console() -> None:
    (budget,) = named("PodDisruptionBudget").values()
    assert budget["spec"]["selector"]["matchLabels"] == PODS["dlqbatch-console"]["metadata"]["labels"]
    assert (
        budget["spec"]["maxUnavailable"] == 1
    )  # with minAvailable a single pod would hold up every node that is drained


@pytest.mark.parametrize("kind", ["ScaledJob", "TriggerAuthentication"])
def test_what_is_for_keda_is_what_keda_understands(kind: str) -> None:
    (document,) = named(kind).values()
    assert keda_problems(document) == []
    broken = json.loads(json.dumps(document))
    broken["spec"] |= {"unheard": 1, "pollingInterval": "soon"} if kind == "ScaledJob" else {"secretTargetRef": {}}
    assert keda_problems(broken), "a schema that finds nothing proves nothing"


def test_the_job_that_keda_starts_is_a_job() -> None:
    (scaled,) = named("ScaledJob").values()
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": scaled["spec"]["jobTargetRef"]}
    kubernetes_validate.validate(job, NEWEST, strict=True)


def test_keda_looks_at_the_queue_that_drain_serves_and_adds_a_run_for_what_one_run_takes() -> None:
    defaults = settings.load({}, {"DLQBATCH_CONFIG": "/dev/null"})
    (scaled,) = named("ScaledJob").values()
    (trigger,) = scaled["spec"]["triggers"]
    asked = trigger["metadata"]
    assert set(asked) <= TRIGGER
    assert (trigger["type"], asked["protocol"], asked["mode"]) == ("rabbitmq", "amqp", "QueueLength")
    assert asked["queueName"] == defaults.retry_queue
    assert int(asked["value"]) == defaults.max_messages == int(asked["activationValue"]) + 1
    authentication = named("TriggerAuthentication")[trigger["authenticationRef"]["name"]]
    (host,) = authentication["spec"]["secretTargetRef"]
    assert host["parameter"] == "host"
    assert host["name"] == SECRET["metadata"]["name"]
    assert host["key"] in SECRET["stringData"]


def test_every_pod_keeps_the_strictest_rules_and_they_differ_only_in_what_they_run() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    (user,) = re.findall(r"^USER (\d+)$", dockerfile, flags=re.MULTILINE)
    for name, pod in PODS.items():
        spec, (container,) = pod["spec"], pod["spec"]["containers"]
        assert spec["securityContext"] == {
            "runAsNonRoot": True,
            "runAsUser": int(user),
            "runAsGroup": int(user),
            "seccompProfile": {"type": "RuntimeDefault"},
        }, name
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, name
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False  # its variables would look like settings
        assert container["resources"]["limits"]["memory"]
        assert set(container["resources"]["requests"]) == {"cpu", "memory"}
        assert {volume["name"] for volume in spec["volumes"]} == {each["name"] for each in container["volumeMounts"]}
    assert len({pod["spec"]["containers"][0]["image"] for pod in PODS.values()}) == 1
    assert len({json.dumps(pod["spec"]["volumes"]) for pod in PODS.values()}) == 1


def test_every_pod_finds_its_settings() -> None:
    folder, file = "/etc/dlqbatch", "application.properties"
    for name, pod in PODS.items():
        (container,) = pod["spec"]["containers"]
        (secret,) = container["envFrom"]
        assert secret["secretRef"]["name"] == SECRET["metadata"]["name"], name
        assert {"name": "DLQBATCH_CONFIG", "value": f"{folder}/{file}"} in container["env"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts == {"config": folder, "tmp": "/tmp"}
        (config,) = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "config"]
        assert config["configMap"]["name"] == CONFIG["metadata"]["name"]
    assert set(CONFIG["data"]) == {file}


def test_every_key_of_the_secret_and_every_line_of_the_configuration_is_a_setting(tmp_path: Path) -> None:
    text = (FOLDER / "secret.example.yaml").read_text().replace("  # DLQBATCH_", "  DLQBATCH_")
    variables = yaml.safe_load(text)["stringData"]
    assert all("CHANGE-ME" in value for value in variables.values())
    assert set(SECRET["stringData"]) == {"DLQBATCH_BROKER_URL", "DLQBATCH_DATABASE_URL"}
    properties = re.sub(r"^#(?=dlqbatch\.)", "", CONFIG["data"]["application.properties"], flags=re.MULTILINE)
    (tmp_path / "application.properties").write_text(properties)
    for pod in PODS.values():
        plain = {each["name"]: each["value"] for each in pod["spec"]["containers"][0]["env"]}
        plain["DLQBATCH_CONFIG"] = str(tmp_path / "application.properties")
        loaded = settings.load({}, variables | plain)
        assert not loaded.warnings
    assert set(javaproperties.loads(properties)) > {"dlqbatch.events.orders.*.created"}


def test_no_pod_bounds_a_check_which_bounds_itself_by_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "application.properties").write_text(CONFIG["data"]["application.properties"])
    shipped = [tmp_path, ROOT, ROOT / "deploy"]
    for pod in PODS.values():
        plain = {each["name"]: each["value"] for each in pod["spec"]["containers"][0]["env"]}
        for folder in shipped:
            loaded = settings.load({}, plain | {"DLQBATCH_CONFIG": str(folder / "application.properties")})
            # A drain's bounds have defaults; set, they would be a check's too.
            assert not loaded.model_fields_set & {"max_messages", "max_bytes"}


def test_every_pod_runs_a_command_that_the_program_has() -> None:
    program = Program({})
    commands = {tuple(arguments) for arguments in ARGUMENTS.values() if arguments}
    assert commands == {
        *(("drain",), ("ingest",), ("lifecycle",), ("monitor",), ("replay", "run"), ("retain",), ("schedule",)),
        *(("db", "upgrade"), ("topology", "apply"), ("console",)),
    }
    for command in sorted(commands):
        assert program.run(*command, "--help").code == 0, command


def test_the_jobs_run_as_often_as_the_schedule_would_run_them() -> None:
    from apscheduler.triggers.cron import CronTrigger  # noqa: PLC0415  (nothing else here needs it)

    crons = named("CronJob")
    assert set(crons) == {f"dlqbatch-{job}" for job in ("drain", "ingest", "lifecycle", "monitor", "replay", "retain")}
    for name, cron in crons.items():
        assert ARGUMENTS[name] == list(COMMANDS[name.removeprefix("dlqbatch-")])
        CronTrigger.from_crontab(cron["spec"]["schedule"])
        nightly = name == "dlqbatch-retain"
        assert (cron["spec"]["schedule"] == "* * * * *") is not nightly


def test_no_deadline_cuts_a_run_short_and_none_lasts_for_ever() -> None:
    defaults = settings.load({}, {"DLQBATCH_CONFIG": "/dev/null"})
    bound = defaults.connect_timeout_seconds + defaults.max_seconds + defaults.settle_seconds
    for _, document in DOCUMENTS:
        spec = inner_spec(document)
        if document["kind"] in {"CronJob", "Job", "ScaledJob"}:
            name = document["metadata"]["name"]
            more = defaults.retain_max_seconds - defaults.max_seconds if name == "dlqbatch-retain" else 0
            assert spec["activeDeadlineSeconds"] >= 2 * (bound + more), name
    for name, pod in PODS.items():
        if name == "dlqbatch-schedule":
            assert pod["spec"]["terminationGracePeriodSeconds"] > bound
        elif ARGUMENTS[name]:
            assert pod["spec"]["terminationGracePeriodSeconds"] > defaults.settle_seconds


def test_the_probes_ask_where_the_console_answers_without_a_login() -> None:
    deployment, service = named("Deployment")["dlqbatch-console"], named("Service")["dlqbatch-console"]
    pod = deployment["spec"]["template"]
    (container,), (port,) = pod["spec"]["containers"], pod["spec"]["containers"][0]["ports"]
    assert {"name": "DLQBATCH_CONSOLE_ADDRESS", "value": f"0.0.0.0:{port['containerPort']}"} in container["env"]
    for probe in ("readinessProbe", "livenessProbe"):
        asked = container[probe]["httpGet"]
        assert asked["port"] == port["name"]
        (route,) = [each for each in routes() if (each.method, each.path) == ("GET", asked["path"])]
        assert route.needs is None
    assert service["spec"]["ports"] == [{"name": port["name"], "port": 8422, "targetPort": port["name"]}]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]


def test_the_probes_ask_where_the_scheduler_answers() -> None:
    deployment = named("Deployment")["dlqbatch-schedule"]
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    (address,) = [each["value"] for each in container["env"] if each["name"] == "DLQBATCH_HEALTH_ADDRESS"]
    (port,) = container["ports"]
    assert address == f"0.0.0.0:{port['containerPort']}"  # a probe comes from outside the pod
    assert container["readinessProbe"]["httpGet"] == {"path": "/healthz", "port": port["name"]}
    # Not /healthz: a job that keeps failing is no reason to start the scheduler anew.
    assert container["livenessProbe"]["httpGet"] == {"path": "/livez", "port": port["name"]}
    service = named("Service")["dlqbatch-schedule"]
    assert service["spec"]["ports"] == [{"name": port["name"], "port": 8421, "targetPort": port["name"]}]
    assert service["metadata"]["annotations"]["prometheus.io/port"] == str(port["containerPort"])
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
