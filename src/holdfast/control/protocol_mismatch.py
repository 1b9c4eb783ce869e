"""Finds agents whose protocol a controller does not speak: its image was replaced by one too far from theirs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from holdfast.errors import ExitCode, HoldfastError
from holdfast.events import AgentConnected, AnyEvent
from holdfast.findings import Finding, Owner
from holdfast.protocol.orders import OLDEST_PROTOCOL, PROTOCOL, ProtocolOffer, versions_text


def protocol_mismatch(node: int, offer: ProtocolOffer) -> Finding:
    """The finding about an agent that this controller does not understand."""
    own = versions_text(OLDEST_PROTOCOL, PROTOCOL)
    return Finding(
        code="protocol-mismatch",
        what=f"the agent of node{node} speaks protocol {offer}, and this controller {own}",
        where=f"node{node}",
        remedy="Set the controller's image back to the release before, or take one whose protocol is a single version "
        "from that of the nodes. Ranks continue meanwhile, for `recovery.controller_grace_s`.",
        owner=Owner.USER,
    )


class AgentProtocols:
    """The protocol versions of a run's agents, as its log has them."""

    def __init__(self) -> None:
        self._offers: dict[int, ProtocolOffer] = {}

    def note(self, history: Iterable[AnyEvent]) -> Iterator[AnyEvent]:
        """The same events; remembers what the agent of each node offered last."""
        for event in history:
            if isinstance(event, AgentConnected):
                self._offers[event.node] = ProtocolOffer(protocol=event.protocol, oldest_protocol=event.oldest_protocol)
            yield event

    def refuse_unspoken(self) -> None:
        """Raise HoldfastError if this controller does not speak with an agent of the run.

        It would replace the nodes that it cannot hear, which would restart all ranks.
        """
        for node, offer in sorted(self._offers.items(), key=lambda each: each[0]):
            if not offer.spoken:
                raise HoldfastError((protocol_mismatch(node, offer),), ExitCode.CANNOT_RUN_HERE)
