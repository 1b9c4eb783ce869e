"""A namespace of the lab for a test, and the pods in it."""

from __future__ import annotations

import json
from typing import Any

from tests.waiting import until

from holdfast.errors import HoldfastError
from holdfast.host import processes
from lab import Lab
from lab.kubelet.container import MARK

DEADLINE_S = 120


class LabNamespace:
    """A namespace of the lab for a test."""

    def __init__(self, lab: Lab, name: str) -> None:
        self.lab = lab
        self.name = name

    def __call__(self, *words: str, document: str | None = None) -> str:
        return self.lab.kubectl("-n", self.name, *words, input=document)

    def create(self, *documents: dict[str, Any]) -> None:
        self("create", "-f", "-", document=json.dumps({"apiVersion": "v1", "kind": "List", "items": documents}))

    def pod(self, script: str | list[str], **spec: Any) -> None:
        """A pod `p` of one container `main` that runs a shell script or a command."""
        container = {
            "name": "main",
            "image": "any",
            "command": ["sh", "-c", script] if isinstance(script, str) else script,
        }
        container |= spec.pop("container", {})
        metadata = {"name": "p"} | spec.pop("metadata", {})
        whole = {"restartPolicy": "Never", "containers": [container]} | spec
        self.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": whole})

    def get(self, kind: str, name: str) -> dict[str, Any]:
        return json.loads(self("get", kind, name, "-o", "json"))

    def phase(self, phase: str, name: str = "p") -> dict[str, Any]:
        self("wait", f"pod/{name}", f"--for=jsonpath={{.status.phase}}={phase}", f"--timeout={DEADLINE_S}s")
        return self.get("pod", name)["status"]

    def says(self, text: str, *words: str) -> str:
        """The output of `logs`, once it contains the text."""

        def told() -> str | None:
            try:
                said = self("logs", "p", *words)
            except HoldfastError:
                return None
            return said if text in said else None

        return until(told, f"the pod says {text}")


def alive(uid: str) -> list[int]:
    """Processes of a pod."""
    marks = (pid for pid in processes.all_pids())
    return [pid for pid in marks if _environ_has(pid, f"{MARK}={uid}/")]


def _environ_has(pid: int, start: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return any(one.startswith(start.encode()) for one in file.read().split(b"\0"))
    except OSError:
        return False
