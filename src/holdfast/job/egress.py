"""The model of a target's `egress`: which connections the pods of a run may open on Kubernetes."""

from __future__ import annotations

from ipaddress import ip_network
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from holdfast.job.pod_settings import LabelValue, ObjectName, QualifiedName
from holdfast.job.spec import Count, Model, Text


def _check_cidr(text: str) -> str:
    try:
        return str(ip_network(text))
    except ValueError as error:
        raise PydanticCustomError("bad-egress", "is not an address block: {reason}", {"reason": str(error)}) from None


Cidr = Annotated[Text, AfterValidator(_check_cidr)]
Port = Annotated[Count, Field(ge=1, le=65535)]


class EgressRule(Model):
    """One destination: an address block, or pods, or with ports alone any address."""

    cidr: Cidr | None = None
    """Addresses, such as `10.20.0.0/16`."""
    namespace: ObjectName | None = None
    """Pods of this namespace; with `pods` alone those of the run's namespace."""
    pods: dict[QualifiedName, LabelValue] = {}
    """Labels of the pods; none means all pods of `namespace`."""
    ports: tuple[Port, ...] = ()
    """Ports there; none means all."""
    protocol: Literal["TCP", "UDP"] = "TCP"
    """Protocol of the ports."""

    @model_validator(mode="after")
    def _one_destination(self) -> Self:
        of_pods = self.namespace is not None or self.pods
        if self.cidr is not None and of_pods:
            raise PydanticCustomError("bad-egress", "must name either `cidr` or pods, in two rules if both are meant")
        if self.cidr is None and not of_pods and not self.ports:
            raise PydanticCustomError("bad-egress", "allows everything: leave out `egress` of the target instead")
        return self
