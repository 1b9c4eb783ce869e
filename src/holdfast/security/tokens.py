"""Tokens that authenticate clients of a run's controller: the user's, and others with fewer rights.

The run's token is the user's. The others are derived from it by HMAC, so a controller stores nothing else. Each names
its holder; no other token can be derived from it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets

from msgspec import Struct


class User(Struct, frozen=True):
    """The user: may cancel the run, inject faults into it and read it."""


class NodeAgent(Struct, frozen=True):
    """The agent of one generation of one node slot: sends that node's messages, and may request nothing."""

    node: int
    generation: int

    def __str__(self) -> str:
        return f"node{self.node}.{self.generation}"


class UnassignedNode(Struct, frozen=True):
    """A process in a node slot whose generation is not known in advance: may only request its generation."""

    node: int

    def __str__(self) -> str:
        return f"node{self.node}"


class MetricsReader(Struct, frozen=True):
    """A monitoring system: may read the run's metrics."""

    def __str__(self) -> str:
        return "metrics"


Principal = User | NodeAgent | UnassignedNode | MetricsReader
_Derived = NodeAgent | UnassignedNode | MetricsReader

_UNASSIGNED_NODE_TOKEN = re.compile(r"node(0|[1-9][0-9]{0,8}):[0-9a-f]{64}")
_NODE_TOKEN = re.compile(r"node(0|[1-9][0-9]{0,8})\.(0|[1-9][0-9]{0,8}):[0-9a-f]{64}")
_METRICS_TOKEN = re.compile(r"metrics:[0-9a-f]{64}")


def new_token() -> str:
    """A run's token: 256 bits of the operating system's randomness."""
    return secrets.token_urlsafe(32)


class TokenIssuer:
    """Issues and verifies the tokens of one run."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    def node_token(self, node: int, generation: int) -> str:
        """The token of one node's agent, such as `node1.0:5f70…`."""
        return self._signed(NodeAgent(node, generation))

    def unassigned_node_token(self, node: int) -> str:
        """The token of an unassigned process in a node slot, such as `node1:5f70…`."""
        return self._signed(UnassignedNode(node))

    def metrics_token(self) -> str:
        """The token of a monitoring system, such as `metrics:5f70…`."""
        return self._signed(MetricsReader())

    def _signed(self, holder: _Derived) -> str:
        name = str(holder)
        return f"{name}:{hmac.new(self._token, name.encode(), hashlib.sha256).hexdigest()}"

    def attempt_key(self, replica: int, attempt: int) -> str:
        """A key that the processes of one attempt share; the controller does not accept it."""
        return hmac.new(self._token, f"attempt{replica}.{attempt}".encode(), hashlib.sha256).hexdigest()

    def host_key(self) -> str:
        """A key by which hosts that connect by themselves prove that the run asked for them."""
        return hmac.new(self._token, b"host", hashlib.sha256).hexdigest()

    def log_signature(self, digest: bytes) -> str:
        """A signature which proves that a controller of this run wrote the log with this digest."""
        return hmac.new(self._token, b"log" + digest, hashlib.sha256).hexdigest()

    def principal_of_header(self, header: str) -> Principal | None:
        """The principal of a request's Authorization header; None if the token is invalid."""
        scheme, _, token = header.partition(" ")
        return self.principal(token) if scheme.lower() == "bearer" else None

    def principal(self, token: str) -> Principal | None:
        """The principal of a token; None if it is invalid. Takes as long for a wrong token as for a right one."""
        claimed = _claimed_principal(token)
        expected = self._signed(claimed).encode() if claimed else self._token
        if not hmac.compare_digest(token.encode(errors="replace"), expected):
            return None
        return claimed or User()


def _claimed_principal(token: str) -> _Derived | None:
    """The principal that a token claims, if it names one."""
    if found := _NODE_TOKEN.fullmatch(token):
        return NodeAgent(int(found[1]), int(found[2]))
    if found := _UNASSIGNED_NODE_TOKEN.fullmatch(token):
        return UnassignedNode(int(found[1]))
    return MetricsReader() if _METRICS_TOKEN.fullmatch(token) else None
