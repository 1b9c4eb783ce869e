"""Rules for what the set-up logs of all ranks together show about the fabric (nccl_transport/): no single line shows
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from holdfast.diagnose.failure_classes import Confidence, FailureClass
from holdfast.diagnose.rules.rule import Rule

FOR_CAUSE: Mapping[str, Rule] = MappingProxyType(
    {
        cause: Rule(
            code=code,
            classes=classes,
            confidence=Confidence.LIKELY,
            message="{what}",
            remedy=("{remedy}",),
            needs=(needs,),
            source="NCCL's set-up lines of all ranks",
            performance_only=True,
        )
        for cause, code, classes, needs in (
            (
                "tcp-fallback",
                "fabric-on-tcp",
                (FailureClass.TCP_FALLBACK, FailureClass.RDMA_DEVICE_MISSING),
                "net-plugin",
            ),
            ("gdr-missing", "fabric-without-gdr", (FailureClass.GDR_MISSING,), "transport"),
            ("rdma-device-missing", "fabric-devices-missing", (FailureClass.RDMA_DEVICE_MISSING,), "net-plugin"),
            ("p2p-disabled", "fabric-without-p2p", (FailureClass.ACS_IOMMU,), "transport"),
        )
    }
)
"""The rule for a degraded fabric, by the finding's code; a finding without one slows no run by itself."""
RULES = tuple(FOR_CAUSE.values())
FABRIC_CODES = frozenset(rule.code for rule in RULES)
