"""The Helm chart, rendered by a real helm: it makes the same objects as the Kustomize folders."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from program import ROOT
from published_schemas import helm, kustomized

from scripts.helm_chart import CONDITIONS, TEMPLATES, templates

CHART = ROOT / "deploy" / "helm" / "dlqbatch"
KUSTOMIZE = ROOT / "deploy" / "kubernetes"
HOOKS = {"helm.sh/hook": "post-install,post-upgrade", "helm.sh/hook-delete-policy": "before-hook-creation"}
SWITCHES = ("migrate", "console", "commands", "keda", "prometheus")


def rendered(*values: str) -> dict[tuple[str, str], dict[str, Any]]:
    made = helm("template", "dlqbatch", str(CHART), *(part for value in values for part in ("--set", value)))
    return by_name([document for document in yaml.safe_load_all(made) if document])


def by_name(documents: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Without the namespace, which Helm gives to all that it makes."""
    for document in documents:
        document["metadata"].pop("namespace", None)
    found = {(document["kind"], document["metadata"]["name"]): document for document in documents}
    assert len(found) == len(documents)
    return found


def test_the_templates_are_those_that_the_folders_make() -> None:
    there = {file.name: file.read_text() for file in TEMPLATES.iterdir()}
    assert there == templates(), "run: python scripts/helm_chart.py"
    left = {file.parent.name for file in KUSTOMIZE.glob("*/kustomization.yaml")} - set(CONDITIONS)
    assert left == {"installation"}


@pytest.mark.parametrize("run", ["cronjobs", "schedule"])
def test_the_chart_makes_what_the_folders_make(run: str) -> None:
    found = rendered(f"run={run}", *(f"{switch}=true" for switch in SWITCHES))
    for job in ("dlqbatch-migrate", "dlqbatch-topology"):
        assert found["Job", job]["metadata"].pop("annotations") == HOOKS
    folders = [run, *SWITCHES]
    wanted = {name: each for folder in folders for name, each in by_name(kustomized(KUSTOMIZE / folder)).items()}
    # Only the comments of the configuration may differ: each names the console in its own way.
    for each in (found, wanted):
        text = each["ConfigMap", "dlqbatch"]["data"]["application.properties"]
        lines = (line for line in text.splitlines() if not line.startswith("# Only for"))
        each["ConfigMap", "dlqbatch"]["data"]["application.properties"] = list(lines)
    assert found == wanted


def test_each_value_changes_what_it_says() -> None:
    everything = rendered("run=schedule")
    assert {kind for kind, _ in everything} == {
        *("ConfigMap", "Deployment", "Job", "NetworkPolicy", "Service", "ServiceAccount")
    }
    assert not [kind for kind, _ in rendered("migrate=false") if kind == "Job"]
    role = "arn:aws:iam::111122223333:role/dlqbatch-retain"
    changed = rendered(
        *("image.repository=mine", "image.tag=v7", "properties=dlqbatch.max-seconds=9", "ca=PEM"),
        rf"retain.annotations.eks\.amazonaws\.com/role-arn={role}",
    )
    assert changed["ConfigMap", "dlqbatch"]["data"] == {
        "application.properties": "dlqbatch.max-seconds=9\n",
        "ca.pem": "PEM\n",
    }
    cron = changed["CronJob", "dlqbatch-drain"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    assert cron["containers"][0]["image"] == "mine:v7"
    annotations = changed["ServiceAccount", "dlqbatch-retain"]["metadata"]["annotations"]
    assert annotations == {"eks.amazonaws.com/role-arn": role}
    assert "annotations" not in changed["ServiceAccount", "dlqbatch"]["metadata"]


def test_a_misspelt_way_to_run_is_refused_before_anything_is_made() -> None:
    with pytest.raises(pytest.fail.Exception, match="run"):
        rendered("run=cronjob")
    with pytest.raises(pytest.fail.Exception, match="imge"):
        rendered("imge.tag=1")


def test_helm_finds_nothing_wrong_with_the_chart() -> None:
    said = helm("lint", "--strict", str(CHART))
    assert "0 chart(s) failed" in said, said
