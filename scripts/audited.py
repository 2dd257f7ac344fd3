"""Reads what pip-audit found, as JSON on stdin, and says it in one line for each package.

pip-audit ends well if its source knows none of the packages at all, as a mirror without advisories does. A package that
was not looked up is not a safe one: here that is an exit code of its own.
"""

from __future__ import annotations

import json
import sys

CLEAN, VULNERABLE, UNKNOWN = 0, 1, 4


def judge(found: str, service: str) -> tuple[int, list[str]]:
    """The exit code, and what to say."""
    try:
        packages = json.loads(found)["dependencies"]
    except (ValueError, KeyError, TypeError):
        return UNKNOWN, [f"{service}: the advisories cannot be reached from here, so nothing was looked up."]
    bad = [
        f"{one['name']} {one['version']}: {each['id']}"
        + (f", fixed in {', '.join(each['fix_versions'])}" if each["fix_versions"] else ", no fix is known")
        for one in packages
        for each in one.get("vulns", ())
    ]
    skipped = [one["name"] for one in packages if "vulns" not in one]
    said = list(bad)
    if skipped or not packages:
        said.append(
            f"{service}: {len(skipped)} of {len(packages)} packages were NOT looked up, so nobody knows of them: "
            f"{', '.join(skipped[:10])}{' …' if len(skipped) > 10 else ''}"  # noqa: PLR2004
        )
    if bad:
        return VULNERABLE, said
    if skipped or not packages:
        return UNKNOWN, said
    return CLEAN, [f"{service}: {len(packages)} packages, no known vulnerability."]


if __name__ == "__main__":
    code, lines = judge(sys.stdin.read(), sys.argv[1])
    print("\n".join(lines), file=sys.stderr if code == UNKNOWN else sys.stdout)
    sys.exit(code)
