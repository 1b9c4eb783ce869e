"""Owns which pod is which generation of a node slot: decided from what is seen of pods and asked of the back end.

Pure but for its memory, which is a value: a back end that is started again has it from the run's log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from holdfast.events import AnyEvent, NodeMade, NodeRequested
from holdfast.job.backend import NodeObservation, NodePlace, Sight


@dataclass(frozen=True, kw_only=True)
class Pod:
    """What is seen of a node's pod."""

    uid: str
    name: str
    node: int
    address: str = ""
    running: bool = False
    leaving: bool = False
    """Whether it is being deleted while it runs: its agent says so itself, and has its ranks save first."""
    over: bool = False
    """Whether it has ended, or is deleted."""
    why: str = ""
    """Why it is over, or not running yet."""


@dataclass(frozen=True, kw_only=True)
class Lives:
    """The pods of a run's nodes, and the generations that are theirs."""

    pods: Mapping[str, Pod] = field(default_factory=dict[str, Pod])
    """Those that are not over, by their uid."""
    held: Mapping[NodePlace, str] = field(default_factory=dict[NodePlace, str])
    """Which pod is which generation, by uid; of each node the newest alone."""
    wanted: Mapping[int, NodePlace] = field(default_factory=dict[int, NodePlace])
    """Generations that a pod is awaited for, by node."""
    spent: frozenset[str] = frozenset()
    """Pods that are to be no generation any more."""
    suspended: str = ""
    """Why no pod is made for any node: the queue has not admitted the run, or has evicted it. Empty once it has."""
    evicted: frozenset[NodePlace] = frozenset()
    """Generations that are said to be evicted."""
    told: Mapping[int, str] = field(default_factory=dict[int, str])
    """Why a node is not there yet, as far as that was said."""

    def want(self, place: NodePlace) -> Lives:
        """Await a pod for a place; what was an earlier generation of it is spent."""
        if place in self.held:
            return self
        former = {uid for held, uid in self.held.items() if held.node == place.node}
        held = {held: uid for held, uid in self.held.items() if held.node != place.node}
        told = {node: why for node, why in self.told.items() if node != place.node}
        return replace(self, held=held, spent=self.spent | former, wanted={**self.wanted, place.node: place}, told=told)

    def see(self, pod: Pod) -> Lives:
        """Take in what is seen of one pod."""
        pods = {uid: known for uid, known in self.pods.items() if uid != pod.uid}
        return replace(self, pods=pods if pod.over else {**pods, pod.uid: pod})

    def suspend(self, why: str) -> Lives:
        """Take in whether the gang is suspended, and why; nothing where it runs."""
        return self if why == self.suspended else replace(self, suspended=why, evicted=frozenset())

    def belied(self, pods: Iterable[Pod]) -> bool:
        """Whether the gang may have been suspended, or admitted, since it was asked for: that comes before its pods."""
        return any(pod.running and not pod.leaving if self.suspended else pod.leaving or pod.over for pod in pods)

    def settle(self) -> tuple[Lives, tuple[NodeObservation, ...]]:
        """Give awaited generations to pods that run, take them from pods that are over, and say so."""
        lives, seen = self, tuple[NodeObservation, ...]()
        if self.suspended:
            seen = tuple(
                NodeObservation(place=place, sight=Sight.EVICTED, reason=self.suspended)
                for place in self.held
                if place not in self.evicted
            )
            lives = replace(lives, evicted=frozenset(self.held))
        for place, uid in self.held.items():
            if uid not in lives.pods:
                lives = replace(lives, held={held: of for held, of in lives.held.items() if held != place})
                seen = (*seen, NodeObservation(place=place, sight=Sight.GONE, reason="its pod is gone"))
        for place in self.wanted.values():
            lives, said = lives._fill(place)
            seen = (*seen, *said)
        return lives, seen

    def generation(self, node: int, address: str) -> int | None:
        """Which generation of a node the pod at an address is; None where it is none, or not known to be one yet."""
        for place, uid in self.held.items():
            pod = self.pods.get(uid)
            if place.node == node and pod is not None and pod.address == address:
                return place.generation
        return None

    def coming(self, place: NodePlace) -> bool:
        """Whether there is a pod that is the one for a place, or is to be it, or one that leaves: it is made anew."""
        leaving = any(pod.leaving for pod in self.pods.values() if pod.node == place.node)
        return place in self.held or leaving or any(self._candidates(place))

    def former(self, place: NodePlace) -> Iterator[Pod]:
        """Pods of a node that are not the one that is awaited or held for a place."""
        return (pod for pod in self.pods.values() if pod.node == place.node and pod.uid in self.spent)

    def _candidates(self, place: NodePlace) -> list[Pod]:
        there = (pod for pod in self.pods.values() if pod.node == place.node and not pod.leaving)
        return [pod for pod in there if pod.uid not in self.spent]

    def _fill(self, place: NodePlace) -> tuple[Lives, tuple[NodeObservation, ...]]:
        candidates = self._candidates(place)
        for pod in candidates:
            if pod.running and pod.address:
                wanted = {node: other for node, other in self.wanted.items() if node != place.node}
                lives = replace(self, held={**self.held, place: pod.uid}, wanted=wanted)
                return lives, (NodeObservation(place=place, sight=Sight.MADE, known_as=pod.uid),)
        why = next((pod.why for pod in candidates if pod.why), self.suspended)
        if why and why != self.told.get(place.node):
            lives = replace(self, told={**self.told, place.node: why})
            return lives, (NodeObservation(place=place, sight=Sight.UNAVAILABLE, reason=why),)
        return self, ()


def known(events: Iterable[AnyEvent]) -> Lives:
    """What a run's log says of its pods: the newest generation that was made of each node, unless it was given up."""
    held: dict[NodePlace, str] = {}
    spent: set[str] = set()
    for event in events:
        if isinstance(event, NodeRequested | NodeMade):
            place = NodePlace(node=event.node, generation=event.generation)
            former = {uid for other, uid in held.items() if other.node == place.node and other != place}
            held = {other: uid for other, uid in held.items() if uid not in former}
            spent |= former
        if isinstance(event, NodeMade) and event.known_as:
            held[NodePlace(node=event.node, generation=event.generation)] = event.known_as
    return Lives(held=held, spent=frozenset(spent))
