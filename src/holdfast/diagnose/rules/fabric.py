"""Rules for what the set-up logs of all ranks, read together, say of the fabric (transport/): no line says it alone."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from holdfast.diagnose.classes import Class
from holdfast.diagnose.rules.row import Rule, Sureness

_SOURCE = "NCCL's set-up lines of all ranks"

RULES: tuple[Rule, ...] = (
    Rule(
        code="fabric-on-tcp",
        classes=(Class.TCP_FALLBACK, Class.RDMA_DEVICE_MISSING),
        sure=Sureness.LIKELY,
        says="{what}",
        remedy=("{remedy}",),
        decides=("net-plugin",),
        source=_SOURCE,
        degrades=True,
    ),
    Rule(
        code="fabric-without-gdr",
        classes=(Class.GDR_MISSING,),
        sure=Sureness.LIKELY,
        says="{what}",
        remedy=("{remedy}",),
        decides=("transport",),
        source=_SOURCE,
        degrades=True,
    ),
    Rule(
        code="fabric-lacks-devices",
        classes=(Class.RDMA_DEVICE_MISSING,),
        sure=Sureness.LIKELY,
        says="{what}",
        remedy=("{remedy}",),
        decides=("net-plugin",),
        source=_SOURCE,
        degrades=True,
    ),
    Rule(
        code="fabric-without-p2p",
        classes=(Class.ACS_IOMMU,),
        sure=Sureness.LIKELY,
        says="{what}",
        remedy=("{remedy}",),
        decides=("transport",),
        source=_SOURCE,
        degrades=True,
    ),
)

_BY_CODE = {rule.code: rule for rule in RULES}
FABRIC_CODES = frozenset(_BY_CODE)

FOR_CAUSE: Mapping[str, Rule] = MappingProxyType(
    {
        "tcp-fallback": _BY_CODE["fabric-on-tcp"],
        "gdr-missing": _BY_CODE["fabric-without-gdr"],
        "rdma-device-missing": _BY_CODE["fabric-lacks-devices"],
        "p2p-disabled": _BY_CODE["fabric-without-p2p"],
    }
)
"""The rule for what spoilt the fabric, by the finding's code; what is not here makes no run slow by itself."""
