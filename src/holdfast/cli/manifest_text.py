"""Formats the findings of a manifest with their patches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from holdfast.cli.finding_text import join_blocks, render_finding, row
from holdfast.report.formatting import sanitize

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.findings import Finding
    from holdfast.launch.kubernetes.foreign.lint import LintedManifest


def render_linted(manifest: LintedManifest) -> Text:
    """Format findings; below each its patch in YAML, for `kubectl patch --type=json`."""
    return join_blocks(map(_block, manifest.findings))


def _block(finding: Finding) -> Text:
    from holdfast.launch.kubernetes.foreign.lint import ManifestFinding, patch_lines

    lines = patch_lines(finding.patch) if isinstance(finding, ManifestFinding) else []
    rows = [row("" if number else "patch", sanitize(line)) for number, line in enumerate(lines)]
    return Text("\n").join([render_finding(finding), *rows])


def summary(file: Path, manifest: LintedManifest) -> str:
    """The last line: how many errors and warnings, and in which objects."""
    from holdfast.findings import Severity

    counts = {
        name: sum(finding.severity is severity for finding in manifest.findings)
        for name, severity in (("error", Severity.ERROR), ("warning", Severity.WARNING))
    }
    found = ", ".join(f"{count} {name}{'s' * (count != 1)}" for name, count in counts.items())
    return f"{file}: {found} in {', '.join(workload.title for workload in manifest.workloads) or 'no training job'}"
