"""What is given as --param, before anything is packaged with it: names that serverless.yml knows, values that work.

`python scripts/lambda_parameters.py --stage prod "broker=orders-mq" …` says what is wrong, one line each, and ends with
2. Serverless itself takes any name, and CloudFormation refuses a value late or never: a function that cannot read its
settings would be deployed, and fail once a minute.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from dlqbatch.errors import SettingsError
from dlqbatch.settings import load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

ROOT: Final = Path(__file__).resolve().parents[1]
OWN: Final = {"python": "--python", "architecture": "--architecture", "packages": "--output"}
"""Those that scripts/package itself gives, by its own options."""
OFF: Final = "off"


def number(least: int, most: int | None = None) -> Callable[[str], str | None]:
    bounds = f"of at least {least}" if most is None else f"from {least} to {most:,}"

    def check(value: str) -> str | None:
        # No sign, no space, no digits of other scripts: it becomes a number of a YAML file.
        is_number = re.fullmatch(r"[0-9]{1,9}", value) is not None
        if is_number and least <= int(value) and (most is None or int(value) <= most):
            return None
        return f"it must be a whole number {bounds}"

    return check


def one_of(*allowed: str) -> Callable[[str], str | None]:
    return lambda value: None if value in allowed else f"it must be one of {', '.join(allowed)}"


def like(pattern: str, what: str) -> Callable[[str], str | None]:
    return lambda value: None if re.fullmatch(pattern, value) else f"it must be {what}"


def setting(option: str, **others: str) -> Callable[[str], str | None]:
    """As the program in the function will judge it."""

    def check(value: str) -> str | None:
        if not value:
            return "it needs a value"
        try:
            load({option: value, **others}, {"DLQBATCH_CONFIG": os.devnull}, overrides_from="--param")
        except SettingsError as error:
            # Its own words, without the value, which is said once.
            words = str(error).replace(f"{option} (--param) ", "it ")
            return words.replace(f"it is '{value}'; ", "").rstrip(".")
        return None

    return check


def unless(exception: str, check: Callable[[str], str | None]) -> Callable[[str], str | None]:
    return lambda value: None if value == exception else check(value)


_MEMORY: Final = number(128, 10_240)
_KEY: Final = unless("", like(r"arn:aws[a-z-]*:kms:.+", "the ARN of a KMS key"))
# What CloudWatch Logs can be told; another number fails the deployment.
_DAYS: Final = (1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731, 1096, 1827, 2192, 2557, 2922, 3288, 3653)
CHECKS: Final[Mapping[str, Callable[[str], str | None]]] = {
    "secret": like(r"[A-Za-z0-9/_+=.@-]{1,512}", "the name of a secret of this account and region, not its ARN"),
    "secretKey": _KEY,
    "databaseSecret": unless("", like(r"arn:aws[a-z-]*:secretsmanager:.+", "the ARN of a secret")),
    "virtualHost": like(r".+", "the name of a virtual host; / is the one that every broker has"),
    "retryQueue": setting("retry_queue"),
    "depth": number(1),
    "subnets": like(r"(subnet-[0-9a-f]+(,subnet-[0-9a-f]+)*)?", "subnet-… and, with commas between them, others"),
    "securityGroups": like(r"(sg-[0-9a-f]+(,sg-[0-9a-f]+)*)?", "sg-… and, with commas between them, others"),
    "alertEmail": like(r"([^@\s]+@[^@\s]+)?", "an address of e-mail"),
    "coldStorageKey": _KEY,
    "metricsNamespace": unless(OFF, setting("metrics_namespace")),
    "memory": _MEMORY,
    "drainMemory": _MEMORY,
    "retainMemory": _MEMORY,
    "drainMessages": setting("max_messages"),
    "drainConcurrency": number(1),
    "check": one_of("true", "false"),
    "failingMinutes": number(1, 5),
    "logRetentionDays": one_of(*map(str, _DAYS)),
    "logLevel": setting("log_level"),
}


def declared(stage: str, text: str) -> dict[str, str]:
    """Parameters of serverless.yml, the stage's own values before the defaults; its YAML is of this plain shape."""
    block = text.partition("\nparams:\n")[2]
    found: dict[str, str] = {}
    here = ""
    for line in block.splitlines():
        if line and not line.startswith(" "):
            break
        if opened := re.fullmatch(r"  (\S+):", line):
            here = opened[1]
        elif here in ("default", stage) and (entry := re.match(r'    (\w+): ("[^"]*"|\S+)', line)):
            found[entry[1]] = entry[2].strip('"').replace("${sls:stage}", stage)
    return found


def problems(stage: str, given: Sequence[str], text: str) -> Iterator[str]:
    known = declared(stage, text)
    values = dict(known)
    for one in given:
        name, equals, value = one.partition("=")
        if name in OWN:
            yield f"{name}: give {OWN[name]} to scripts/package instead"
        elif name not in known:
            near = get_close_matches(name, known, 1)
            yield f"{name}: there is no such parameter" + (f"; is {near[0]} meant?" if near else "")
        elif not equals:
            yield f"{name}: it has no value; write {name}=VALUE"
        else:
            values[name] = value
    for name, check in CHECKS.items():
        wrong = check(values[name])
        if wrong is not None:
            yield f"{name} is '{values[name]}': {wrong}"
    if bool(values["subnets"]) != bool(values["securityGroups"]):
        yield "subnets and securityGroups: give both or neither; a function enters a VPC with both"


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks the parameters of a package for AWS Lambda.")
    parser.add_argument("--stage", default="dev")
    parser.add_argument("parameters", nargs="*", metavar="name=value")
    options = parser.parse_args()
    text = (ROOT / "serverless.yml").read_text(encoding="utf-8")
    found = list(problems(options.stage, options.parameters, text))
    if not found:
        return 0
    print("Nothing is packaged, because of these parameters:", file=sys.stderr)
    print("\n".join(f"  {problem}" for problem in found), file=sys.stderr)
    names = sorted(declared(options.stage, text).keys() - OWN)
    print(f"There are: {', '.join(names)}. docs/aws.md says what each is.", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
