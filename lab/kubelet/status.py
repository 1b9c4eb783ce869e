"""Pod status: the phase, conditions and container statuses that follow from its containers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from lab.kubelet.api import KubeObject

_WAITING: KubeObject = {"waiting": {"reason": "ContainerCreating"}}
_INITIALIZING: KubeObject = {"waiting": {"reason": "PodInitializing"}}


@dataclass(kw_only=True)
class ContainerState:
    """State of one container."""

    now: KubeObject = field(default_factory=lambda: _WAITING)
    last: KubeObject = field(default_factory=dict)
    restarts: int = 0
    started: bool = False
    """Whether its startup probe, if any, has succeeded."""
    ready: bool = False

    @property
    def exit_code(self) -> int | None:
        return self.now.get("terminated", {}).get("exitCode")

    @property
    def running(self) -> bool:
        return "running" in self.now


def moment() -> str:
    """The current time in seconds, in the format of statuses."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def running() -> KubeObject:
    """The state of a container that has just started."""
    return {"running": {"startedAt": moment()}}


def waiting(reason: str, message: str = "") -> KubeObject:
    """The state of a container that has yet to start."""
    return {"waiting": {"reason": reason, "message": message}}


def terminated(code: int, started_at: str, *, reason: str = "", container_id: str = "") -> KubeObject:
    """The state of a container that has exited."""
    shown_reason = reason or ("Completed" if code == 0 else "Error")
    ended: KubeObject = {"exitCode": code, "reason": shown_reason, "startedAt": started_at, "finishedAt": moment()}
    return {"terminated": ended | ({"containerID": container_id} if container_id else {})}


def pod_status(
    pod: KubeObject,
    states: Mapping[str, ContainerState],
    *,
    phase: str,
    initialized: bool,
    started_at: str,
    addresses: Mapping[str, str],
    reason: str = "",
    message: str = "",
) -> KubeObject:
    """The status patch; the API server merges conditions by type with those of other writers.

    With a message, the kubelet itself has ended the pod. That is reported once its containers have ended.
    """
    spec = pod["spec"]
    mains = [states[one["name"]] for one in spec["containers"]]
    ended = phase in ("Succeeded", "Failed")
    ready = not ended and all(state.ready for state in mains)
    why_not = {"Succeeded": "PodCompleted", "Failed": "PodFailed"}.get(phase, "ContainersNotReady")
    status: KubeObject = {
        "phase": phase,
        "startTime": started_at,
        "hostIP": addresses["hostIP"],
        "hostIPs": [{"ip": addresses["hostIP"]}],
        "conditions": [
            _condition("PodReadyToStartContainers", bool(addresses.get("podIP")) and not ended),
            _condition("Initialized", initialized, "ContainersNotInitialized"),
            _condition("Ready", ready, why_not),
            _condition("ContainersReady", ready, why_not),
        ],
        "containerStatuses": _statuses(pod, spec["containers"], states, _WAITING if initialized else _INITIALIZING),
        "reason": (ended and reason) or None,
        "message": (ended and message) or None,
    }
    if ended and message:
        disruption = _condition("DisruptionTarget", True) | {"reason": "TerminationByKubelet", "message": message}
        status["conditions"].append(disruption)
    if address := addresses.get("podIP"):
        status |= {"podIP": address, "podIPs": [{"ip": address}]}
    if inits := spec.get("initContainers"):
        status["initContainerStatuses"] = _statuses(pod, inits, states, _INITIALIZING)
    return status


def _condition(kind: str, value: bool, reason: str = "") -> KubeObject:
    one: KubeObject = {"type": kind, "status": str(value), "lastTransitionTime": moment()}
    return one | ({"reason": reason} if reason and not value else {"reason": None})


def _statuses(
    pod: KubeObject, containers: Sequence[KubeObject], states: Mapping[str, ContainerState], untouched: KubeObject
) -> list[KubeObject]:
    listed: list[KubeObject] = []
    for container in containers:
        state = states[container["name"]]
        at_first = state.now is _WAITING
        one: dict[str, Any] = {
            "name": container["name"],
            "image": container["image"],
            "imageID": f"process://{container['image']}",
            "containerID": "" if at_first else container_id(pod, container, state),
            "ready": state.ready,
            "started": state.started,
            "restartCount": state.restarts,
            "state": _only(untouched if at_first else state.now),
            "lastState": _only(state.last),
        }
        listed.append(one)
    return listed


def container_id(pod: KubeObject, container: KubeObject, state: ContainerState) -> str:
    """An id for one start of a container."""
    return f"process://{pod['metadata']['uid']}/{container['name']}/{state.restarts}"


def _only(state: KubeObject) -> KubeObject:
    """A state with the other two set to null, because the patch is merged."""
    return {"running": None, "waiting": None, "terminated": None} | state
