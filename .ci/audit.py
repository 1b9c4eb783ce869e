"""`make audit`: asks the OSV database whether any pinned dependency has a known vulnerability; standard library only.

Exit code 1 when one has, and when the answer cannot be understood. A database that cannot be reached is no reason to
stop work: then it says that nothing was audited, and exits with 0.
"""

from __future__ import annotations

import json
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

DATABASE = "https://api.osv.dev/v1/querybatch"
TIMEOUT_S = 20.0

ACCEPTED: dict[str, str] = {}
"""Ids of advisories that do not concern us, each with the reason."""

_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", re.MULTILINE)

Pin = tuple[str, str]


class Unreachable(Exception):
    """The database did not answer."""


def pins(lock: str) -> list[Pin]:
    """Name and version of everything in a lock."""
    return _PIN.findall(lock)


def known(asked: list[Pin], database: str) -> Iterator[tuple[Pin, str]]:
    """Every pin with each advisory about it; raises Unreachable, and ValueError for an answer that is none."""
    queries = [{"package": {"name": name, "ecosystem": "PyPI"}, "version": version} for name, version in asked]
    request = urllib.request.Request(
        database, json.dumps({"queries": queries}).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            results = json.load(answer)["results"]
    except urllib.error.HTTPError as error:
        if error.code == 400:
            raise ValueError("it does not understand the question") from error
        raise Unreachable(str(error)) from error
    except (OSError, json.JSONDecodeError) as error:  # a closed network may answer with a page of its own
        raise Unreachable(str(error)) from error
    except (KeyError, TypeError) as error:
        raise ValueError(f"no results in it: {error!r}") from error
    if len(results) != len(asked):
        raise ValueError(f"{len(results)} results for {len(asked)} questions")
    for pin, result in zip(asked, results, strict=True):
        for advisory in result.get("vulns", ()):
            yield pin, advisory["id"]


def main() -> int:
    """Audit the lock named on the command line, with the database named after it or the public one."""
    lock, database = [*sys.argv[1:], DATABASE][:2]
    asked = pins(Path(lock).read_text())
    try:
        found = list(known(asked, database))
    except Unreachable as error:
        print(f"not audited: the advisory database cannot be reached ({error})")
        return 0
    except ValueError as error:
        print(f"not audited: the advisory database's answer cannot be understood ({error})", file=sys.stderr)
        return 1
    for (package, version), name in found:
        why = f"accepted: {ACCEPTED[name]}" if name in ACCEPTED else f"see https://osv.dev/vulnerability/{name}"
        print(f"{package} {version}: {name}, {why}", file=sys.stderr)
    open_ones = [name for _, name in found if name not in ACCEPTED]
    if open_ones:
        print("Remedy: make lock UPGRADE='--upgrade-package NAME', or say in .ci/audit.py why not.", file=sys.stderr)
        return 1
    print(f"audited: {len(asked)} packages, no known vulnerability that is not accepted")
    return 0


if __name__ == "__main__":
    sys.exit(main())
