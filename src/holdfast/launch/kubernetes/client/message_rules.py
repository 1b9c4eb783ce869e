"""Rules that map a cluster's messages to findings, and the rules for admission rejections.

pending_rules.py applies them to the objects of a pending run, api_errors.py to responses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from msgspec import Struct

from holdfast.findings import Finding, Owner, Severity


class MessageRule(Struct, frozen=True, kw_only=True):
    """A pattern of cluster messages and its finding. The pattern's groups fill `message`."""

    pattern: str
    code: str
    message: str
    remedy: str
    severity: Severity = Severity.WARNING
    owner: Owner = Owner.CLUSTER

    def finding(self, where: str, text: str, found: Mapping[str, str | None] | None = None) -> Finding:
        """The finding for this text, found at `where`."""
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
    """The finding of the first rule that matches the text."""
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
        remedy="The cluster's administrator must restart it; a waiting run then continues by itself.",
        severity=Severity.ERROR,
    ),
    # admission webhook "x" denied the request: ...
    MessageRule(
        pattern=r'admission webhook "(?P<name>[^"]+)" denied the request: (?P<why>.+)',
        code="webhook-refused",
        message="the webhook {name} refuses its pods: {why}",
        remedy="Fix what it names, in the job or in the target.",
        severity=Severity.ERROR,
        owner=Owner.USER,
    ),
    # pods "x" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied request: ...
    MessageRule(
        pattern=r"ValidatingAdmissionPolicy '(?P<name>[^']+)' with binding '[^']+' denied request: (?P<why>.+)",
        code="policy-refused",
        message="the cluster's policy {name} refuses it: {why}",
        remedy="Fix what it names, in the job or in the target; `kubectl get validatingadmissionpolicies` lists them.",
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
"""Rejections of an object at admission, by the API server or by a webhook."""
