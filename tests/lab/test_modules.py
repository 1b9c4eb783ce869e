"""Go compiles a package anew for each version of anything it imports: the lab's modules must agree where they can."""

from __future__ import annotations

import re
from collections import defaultdict

from lab import toolchain

REQUIRED = re.compile(r"^\t(\S+) (v\S+)", re.MULTILINE)
REPLACED = re.compile(r"^\t\S+ => (\S+) (v\S+)", re.MULTILINE)
BASE = re.compile(r"golang\.org/x/(net|sys|text|term|crypto)|google\.golang\.org/protobuf")
"""What every Kubernetes client imports."""
KUBERNETES = re.compile(r"k8s\.io/(api|apimachinery|client-go|apiextensions-apiserver)")
MODULES = tuple(
    module.name
    for module in (
        toolchain.CONTROLPLANE,
        toolchain.OPERATORS,
        toolchain.VOLCANO,
        toolchain.TRAEFIK,
        toolchain.FLUX,
        toolchain.HELM,
    )
)
"""All that are built before the tests."""


def versions(wanted: re.Pattern[str]) -> dict[str, set[str]]:
    """The versions of these modules that the lab compiles."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for name in MODULES:
        text = (toolchain.HERE / name / "go.mod").read_text()
        for path, version in {**dict(REQUIRED.findall(text)), **dict(REPLACED.findall(text))}.items():
            if wanted.fullmatch(path):
                found[path].add(version)
    return found


def test_modules_compile_the_same_version_of_what_every_kubernetes_client_imports() -> None:
    used = versions(BASE)
    assert len(used) == 6
    assert {path: sorted(found) for path, found in used.items() if len(found) > 1} == {}


def test_modules_of_one_kubernetes_minor_compile_the_same_patch_version_of_it() -> None:
    for path, found in versions(KUBERNETES).items():
        minors = [version.rpartition(".")[0] for version in found]
        assert len(minors) == len(set(minors)) > 1, (path, sorted(found))
