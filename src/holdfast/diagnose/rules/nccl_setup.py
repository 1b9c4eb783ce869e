"""Rules for what the set-up logs of all ranks together show about the fabric (nccl_transport/): no single line shows
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from holdfast.diagnose.failure_classes import Confidence, FailureClass
from holdfast.diagnose.rules.rule import Rule

_SOURCE = "NCCL's set-up lines of all ranks"

RULES: tuple[Rule, ...] = (
    Rule(
        code="fabric-on-tcp",
        classes=(FailureClass.TCP_FALLBACK, FailureClass.RDMA_DEVICE_MISSING),
        confidence=Confidence.LIKELY,
        message="{what}",
        remedy=("{remedy}",),
        needs=("net-plugin",),
        source=_SOURCE,
        performance_only=True,
    ),
    Rule(
        code="fabric-without-gdr",
        classes=(FailureClass.GDR_MISSING,),
        confidence=Confidence.LIKELY,
        message="{what}",
        remedy=("{remedy}",),
        needs=("transport",),
        source=_SOURCE,
        performance_only=True,
    ),
    Rule(
        code="fabric-devices-missing",
        classes=(FailureClass.RDMA_DEVICE_MISSING,),
        confidence=Confidence.LIKELY,
        message="{what}",
        remedy=("{remedy}",),
        needs=("net-plugin",),
        source=_SOURCE,
        performance_only=True,
    ),
    Rule(
        code="fabric-without-p2p",
        classes=(FailureClass.ACS_IOMMU,),
        confidence=Confidence.LIKELY,
        message="{what}",
        remedy=("{remedy}",),
        needs=("transport",),
        source=_SOURCE,
        performance_only=True,
    ),
)

_BY_CODE = {rule.code: rule for rule in RULES}
FABRIC_CODES = frozenset(_BY_CODE)

FOR_CAUSE: Mapping[str, Rule] = MappingProxyType(
    {
        "tcp-fallback": _BY_CODE["fabric-on-tcp"],
        "gdr-missing": _BY_CODE["fabric-without-gdr"],
        "rdma-device-missing": _BY_CODE["fabric-devices-missing"],
        "p2p-disabled": _BY_CODE["fabric-without-p2p"],
    }
)
"""The rule for a degraded fabric, by the finding's code; a finding without one slows no run by itself."""
