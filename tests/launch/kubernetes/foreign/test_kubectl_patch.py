"""`kubectl` itself applies the patches of findings."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import yaml
from tests.launch.kubernetes.foreign.manifests import manifest
from tests.launch.kubernetes.foreign.test_lint_rules import CASES, codes, patched

from lab import Lab

pytestmark = pytest.mark.slow


def test_kubectl_applies_patches_alike(lab: Lab, tmp_path: Path) -> None:
    file, patch = tmp_path / "m.yaml", tmp_path / "patch.yaml"
    for case in {case.code: case for case in CASES}.values():
        bad = manifest(case.kind, case.changes)
        finding = codes(bad)[case.code]
        file.write_text(yaml.safe_dump(bad))
        patch.write_bytes(msgspec.json.encode(finding.patch))
        answer = lab.kubectl("patch", "--local", "-f", file, "--type=json", "--patch-file", patch, "-o", "json")
        assert json.loads(answer) == patched(bad, finding)
