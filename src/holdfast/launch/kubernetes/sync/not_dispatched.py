"""The error of a run that no worker cluster has."""

from __future__ import annotations

from holdfast.findings import Finding


class NotDispatchedError(Exception):
    """No worker cluster that this machine can reach has the run."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.what)
        self.finding = finding
