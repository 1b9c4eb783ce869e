"""Owns a row of what a cluster says and what it comes to, and the rows for what it says of objects it would not take.

Refuses to own where the words are found: in a waiting run's objects (pending.py), in an answer (refusals.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.findings import Fault, Finding, Severity


@dataclass(frozen=True, kw_only=True)
class Reason:
    """A row: words of the cluster's, and what they come to. `says` is filled from the pattern's groups."""

    pattern: str
    code: str
    says: str
    remedy: str
    severity: Severity = Severity.WARNING
    fault: Fault = Fault.CLUSTER

    def finding(self, where: str, text: str, found: Mapping[str, str | None] | None = None) -> Finding:
        """What the row says of these words, which were found there."""
        return Finding(
            code=self.code,
            severity=self.severity,
            what=self.says.format_map({name: value or "" for name, value in (found or {}).items()}).strip(),
            where=where,
            evidence=(text.strip(),),
            remedy=self.remedy,
            fault=self.fault,
        )


def understood(reasons: Sequence[Reason], where: str, text: str) -> Finding | None:
    """What the first row that knows these words says of them."""
    for reason in reasons:
        if found := re.search(reason.pattern, text, re.DOTALL):
            return reason.finding(where, text, found.groupdict())
    return None


ADMISSION: tuple[Reason, ...] = (
    # failed calling webhook "mjobset.kb.io": failed to call webhook: Post "https://...": connection refused
    Reason(
        pattern=r'failed calling webhook "(?P<name>[^"]+)".*?: (?P<why>[^:]+)$',
        code="webhook-down",
        says="nothing can be made here: the webhook {name} does not answer ({why})",
        remedy="Whoever runs the cluster must start it again; a run that waits goes on by itself then.",
        severity=Severity.ERROR,
    ),
    # admission webhook "x" denied the request: ...
    Reason(
        pattern=r'admission webhook "(?P<name>[^"]+)" denied the request: (?P<why>.+)',
        code="webhook-refused",
        says="the webhook {name} refuses its pods: {why}",
        remedy="Mend what it names, in the job or in the profile.",
        severity=Severity.ERROR,
        fault=Fault.USER,
    ),
    # pods "x" is forbidden: exceeded quota: q, requested: ..., used: ..., limited: ...
    Reason(
        pattern=r"is forbidden: (?P<why>exceeded quota.+|violates PodSecurity.+|.+)",
        code="pods-forbidden",
        says="the cluster does not allow its pods: {why}",
        remedy="Ask for less, or have the namespace's policy or quota changed.",
        severity=Severity.ERROR,
    ),
)
"""Said of an object on its way in, by the API server itself or by a webhook that it asks."""
