"""Owns a row of what a cluster says and what it comes to, and the rows for what it says of objects it would not take.

Refuses to own where the words are found: in a waiting run's objects (pending_rules.py), in an answer (api_errors.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.findings import Finding, Owner, Severity


@dataclass(frozen=True, kw_only=True)
class MessageRule:
    """A row: words of the cluster's, and what they come to. `says` is filled from the pattern's groups."""

    pattern: str
    code: str
    message: str
    remedy: str
    severity: Severity = Severity.WARNING
    owner: Owner = Owner.CLUSTER

    def finding(self, where: str, text: str, found: Mapping[str, str | None] | None = None) -> Finding:
        """What the row says of these words, which were found there."""
        return Finding(
            code=self.code,
            severity=self.severity,
            what=self.message.format_map({name: value or "" for name, value in (found or {}).items()}).strip(),
            where=where,
            evidence=(text.strip(),),
            remedy=self.remedy,
            owner=self.owner,
        )


def match_rule(rules: Sequence[MessageRule], where: str, text: str) -> Finding | None:
    """What the first row that knows these words says of them."""
    for reason in rules:
        if found := re.search(reason.pattern, text, re.DOTALL):
            return reason.finding(where, text, found.groupdict())
    return None


ADMISSION_RULES: tuple[MessageRule, ...] = (
    # failed calling webhook "mjobset.kb.io": failed to call webhook: Post "https://...": connection refused
    MessageRule(
        pattern=r'failed calling webhook "(?P<name>[^"]+)".*?: (?P<why>[^:]+)$',
        code="webhook-down",
        message="nothing can be made here: the webhook {name} does not answer ({why})",
        remedy="Whoever runs the cluster must start it again; a run that waits goes on by itself then.",
        severity=Severity.ERROR,
    ),
    # admission webhook "x" denied the request: ...
    MessageRule(
        pattern=r'admission webhook "(?P<name>[^"]+)" denied the request: (?P<why>.+)',
        code="webhook-refused",
        message="the webhook {name} refuses its pods: {why}",
        remedy="Mend what it names, in the job or in the target.",
        severity=Severity.ERROR,
        owner=Owner.USER,
    ),
    # pods "x" is forbidden: exceeded quota: q, requested: ..., used: ..., limited: ...
    MessageRule(
        pattern=r"is forbidden: (?P<why>exceeded quota.+|violates PodSecurity.+|.+)",
        code="pods-forbidden",
        message="the cluster does not allow its pods: {why}",
        remedy="Ask for less, or have the namespace's policy or quota changed.",
        severity=Severity.ERROR,
    ),
)
"""Said of an object on its way in, by the API server itself or by a webhook that it asks."""
