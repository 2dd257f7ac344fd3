"""Makes the templates of the Helm chart of the Kustomize folders, so that both say the same.

`python scripts/helm_chart.py` writes deploy/helm/dlqbatch/templates. The values of the chart take the places of what
the folder `installation` and the file base/config.yaml hold.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
MANIFESTS: Final = ROOT / "deploy" / "kubernetes"
TEMPLATES: Final = ROOT / "deploy" / "helm" / "dlqbatch" / "templates"
CONDITIONS: Final = {
    "base": None,
    "migrate": ".Values.migrate",
    "cronjobs": 'eq .Values.run "cronjobs"',
    "schedule": 'eq .Values.run "schedule"',
    "keda": ".Values.keda",
    "console": ".Values.console",
    "prometheus": ".Values.prometheus",
    "commands": ".Values.commands",
}
"""When the manifests of a folder are wanted."""
IMAGE: Final = re.compile(r"image: dlqbatch:\S+")
JOB_NAME: Final = re.compile(r"^(kind: Job\nmetadata:\n)", re.MULTILINE)
# A Job cannot be changed: Helm deletes the old one, and makes it anew when all else is there.
HOOK: Final = """\
  annotations:
    helm.sh/hook: post-install,post-upgrade
    helm.sh/hook-delete-policy: before-hook-creation
"""
RETAIN: Final = re.compile(r"^  name: dlqbatch-retain\n  labels:\n    .*\n", re.MULTILINE)
IDENTITY: Final = """\
  {{- with .Values.retain.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
"""
CONFIG: Final = """\
  application.properties: |
    {{- .Values.properties | nindent 4 }}
  {{- with .Values.ca }}
  ca.pem: |
    {{- . | nindent 4 }}
  {{- end }}
"""


def templates() -> dict[str, str]:
    """What each file of the chart holds, by its name."""
    return {
        f"{folder}-{file.name}": _template(folder, file.name, file.read_text())
        for folder in CONDITIONS
        for file in sorted((MANIFESTS / folder).glob("*.yaml"))
        if file.name != "kustomization.yaml"
    }


def _template(folder: str, name: str, text: str) -> str:
    text = text.replace("{{", '{{ "{{" }}')  # what Prometheus fills in
    text = IMAGE.sub('image: "{{ .Values.image.repository }}:{{ .Values.image.tag }}"', text)
    if name == "migrate.yaml":
        text = JOB_NAME.sub(lambda found: found[0] + HOOK, text)
    elif name == "service-accounts.yaml":
        text = RETAIN.sub(lambda found: found[0] + IDENTITY, text)
    elif name == "config.yaml":
        text = text[: text.index("\ndata:\n")] + "\ndata:\n" + CONFIG
    condition = CONDITIONS[folder]
    made = f"# Made of deploy/kubernetes/{folder}/{name} by scripts/helm_chart.py; change that.\n{text}"
    return made if condition is None else f"{{{{- if {condition} }}}}\n{made.rstrip()}\n{{{{- end }}}}\n"


def main() -> None:
    TEMPLATES.mkdir(parents=True, exist_ok=True)
    for old in TEMPLATES.glob("*.yaml"):
        old.unlink()
    for name, text in templates().items():
        (TEMPLATES / name).write_text(text)


if __name__ == "__main__":
    main()
