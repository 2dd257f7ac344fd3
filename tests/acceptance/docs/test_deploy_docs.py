"""The commands of docs/deploy.md: run if possible, else compared with what they name."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING

import yaml
from program import HANGS_AFTER, ROOT, environment

if TYPE_CHECKING:
    from pathlib import Path

    from program import Client, Program

DEPLOY = (ROOT / "docs" / "deploy.md").read_text()
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
# They change the machine, or need what a test does not have; what they name is looked at instead.
MACHINE = ("sudo useradd", "sudo python3 -m venv", "sudo systemctl", "sudo /opt/dlqbatch/.venv/bin/pip")
MANIFESTS = ROOT / "deploy" / "kubernetes"
OBJECTS = {
    f"{document['kind'].lower()}/{document['metadata']['name']}"
    for file in MANIFESTS.rglob("*.yaml")
    for document in yaml.safe_load_all(file.read_text())
    if file.name != "kustomization.yaml"
}


def section(begin: str, end: str) -> str:
    text = DEPLOY[DEPLOY.index(f"\n{begin}\n") :]
    return text[: text.index(f"\n{end}\n")]


def lines(begin: str, end: str) -> list[str]:
    return "".join(BLOCK.findall(section(begin, end))).splitlines()


def placed(text: str, root: Path) -> str:
    """With a folder of the test for the root of the machine, and its user for all users."""
    text = re.sub(r"\bsudo (-u dlqbatch (--preserve-env=\S+ )?)?", "", re.sub(r"-[og] (root|dlqbatch) ", "", text))
    return re.sub(r"(?<![\w./])/(?=(opt|etc|var|usr)/)", f"{root}/", text)


def test_the_commands_for_one_machine_lead_from_a_checkout_to_a_first_run(
    program: Program, team: Client, tmp_path: Path
) -> None:
    team.make_origin("orders-queue")
    team.fail("orders-queue", "orders.eu.created", b"one")
    root = tmp_path / "machine"
    for folder in ("usr/local/bin", "etc/cron.d", "etc/logrotate.d", "etc/systemd/system"):
        (root / folder).mkdir(parents=True)
    typed = [line for line in lines("## One machine", "## Containers") if not line.startswith(MACHINE)]
    settings = root / "etc/dlqbatch/application.properties"
    said = ""
    for line in typed:
        if line.startswith("dlqbatch ") and "CHANGE-ME" in settings.read_text():
            prepare(root, settings, program)
        done = subprocess.run(
            ["sh", "-eu", "-c", placed(line, root).replace(f"{root}/opt/dlqbatch/.venv/bin/python", sys.executable)],
            cwd=ROOT,
            env={name: value for name, value in environment().items() if not name.startswith("DLQBATCH_")}
            | {"PATH": f"{root}/usr/local/bin:/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=HANGS_AFTER,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        said += done.stdout
    assert "dry run of drain: ok" in said
    assert settings.stat().st_mode & 0o777 == 0o640
    assert (root / "var/lib/dlqbatch").stat().st_mode & 0o777 == 0o700
    assert (root / "var/lib/dlqbatch/dlqbatch.sqlite3").exists()
    assert len(list((root / "etc/systemd/system").iterdir())) == len(list((ROOT / "deploy/systemd").iterdir()))
    assert (root / "etc/cron.d/dlqbatch").read_text() == (ROOT / "deploy/cron/crontab").read_text()


def prepare(root: Path, settings: Path, program: Program) -> None:
    """What the page tells in words: your broker; and the adapted command in the place of the installed one."""
    text = settings.read_text().replace("/var/lib", f"{root}/var/lib")
    text = re.sub(r"^(dlqbatch\.broker-url)=.*$", rf"\1={program.settings['broker_url']}", text, flags=re.MULTILINE)
    settings.write_text(text.replace("CHANGE-ME", "changed") + f"dlqbatch.tier-ttls={program.settings['tier_ttls']}\n")
    command = root / "usr/local/bin/dlqbatch"
    venv = f"{root}/opt/dlqbatch/.venv/bin/python"
    command.write_text(placed(command.read_text(), root).replace(venv, sys.executable))


def test_every_unit_that_is_started_is_there() -> None:
    units = {unit.name for unit in (ROOT / "deploy" / "systemd").iterdir()}
    enabled = re.findall(r"systemctl enable --now (.+)", DEPLOY)
    assert {name for line in enabled for name in line.split()} == units - {"dlqbatch@.service"}
    for name in re.findall(r"systemctl (?:start|edit) (\S+?)`", DEPLOY):
        assert name.partition("@")[0] + "@.service" in units


def test_every_command_for_containers_names_what_is_there() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    typed = lines("## Containers", "## Kubernetes")
    for line in typed:
        words = shlex.split(line)
        if words[:2] == ["docker", "compose"]:
            named = [word for word in words[3:] if not word.startswith("--")]
            assert not named or named[0] in services, line
    assert sum(line.startswith("docker") for line in typed) + sum(line.startswith("curl") for line in typed) == len(
        typed
    )
    tags = set(re.findall(r"(?<![\w/])dlqbatch:[\d.]+", DEPLOY))
    images = {name for file in MANIFESTS.rglob("*.yaml") for name in re.findall(r"image: (\S+)", file.read_text())}
    assert tags == images


def test_every_command_for_kubernetes_names_what_is_there() -> None:
    text = section("## Kubernetes", "## Amazon ECS")
    for file in re.findall(r"-f ([^\s`]+)", text):
        assert (ROOT / file).is_file(), file
    for folder in re.findall(r"-k ([^\s`]+)", text.partition("\n\n")[2]):
        assert (ROOT / folder / "kustomization.yaml").is_file(), folder
    for kind, name in re.findall(r"\b(job|cronjob|deployment|pod)/([\w-]+)", text):
        assert f"{kind}/{name}" in OBJECTS
    folders = {file.parent.name for file in MANIFESTS.glob("*/kustomization.yaml")}
    assert set(re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE)) == folders
