"""Owns who may speak to a run's controller: its operator, and each node for itself, by tokens that give no more.

The run's token is the operator's. A node's token is made from it, so that a controller keeps nothing else; it names
its node, and nobody can make another's from it, or the operator's.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass


@dataclass(frozen=True)
class User:
    """Whoever may ask anything of the run: cancel it, break it, read it."""


@dataclass(frozen=True)
class NodeAgent:
    """The agent of one generation of one node slot: it speaks for that node, and asks for nothing."""

    node: int
    generation: int

    def __str__(self) -> str:
        return f"node{self.node}.{self.generation}"


@dataclass(frozen=True)
class UnassignedNode:
    """Whoever came to life in a node slot, where nobody could know beforehand of which generation: it may ask that."""

    node: int

    def __str__(self) -> str:
        return f"node{self.node}"


Principal = User | NodeAgent | UnassignedNode

_UNASSIGNED_NODE_TOKEN = re.compile(r"node(0|[1-9][0-9]{0,8}):[0-9a-f]{64}")
_NODE_TOKEN = re.compile(r"node(0|[1-9][0-9]{0,8})\.(0|[1-9][0-9]{0,8}):[0-9a-f]{64}")


def new_token() -> str:
    """A run's token: 256 bits of the operating system's randomness."""
    return secrets.token_urlsafe(32)


class TokenIssuer:
    """Makes and knows the tokens of one run."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    def node_token(self, node: int, generation: int) -> str:
        """The token of one node's agent, such as `node1.0:5f70…`."""
        return self._signed(NodeAgent(node, generation))

    def unassigned_node_token(self, node: int) -> str:
        """The token of whoever takes a node slot, such as `node1:5f70…`."""
        return self._signed(UnassignedNode(node))

    def _signed(self, holder: NodeAgent | UnassignedNode) -> str:
        name = str(holder)
        return f"{name}:{hmac.new(self._token, name.encode(), hashlib.sha256).hexdigest()}"

    def attempt_key(self, replica: int, attempt: int) -> str:
        """What the processes of one attempt know one another by; it opens nothing here."""
        return hmac.new(self._token, f"attempt{replica}.{attempt}".encode(), hashlib.sha256).hexdigest()

    def log_signature(self, digest: bytes) -> str:
        """What proves that a log with this digest was written by a controller of this run."""
        return hmac.new(self._token, b"log" + digest, hashlib.sha256).hexdigest()

    def principal_of_header(self, header: str) -> Principal | None:
        """Whose token a request's Authorization header shows; None when it is nobody's."""
        scheme, _, token = header.partition(" ")
        return self.principal(token) if scheme.lower() == "bearer" else None

    def principal(self, token: str) -> Principal | None:
        """Whose token this is; None when it is nobody's. Takes as long for a wrong token as for a right one."""
        said = _claimed_principal(token)
        expected = self._signed(said).encode() if said else self._token
        if not hmac.compare_digest(token.encode(errors="replace"), expected):
            return None
        return said or User()


def _claimed_principal(token: str) -> NodeAgent | UnassignedNode | None:
    """Whose a token says to be, if it names anybody."""
    if found := _NODE_TOKEN.fullmatch(token):
        return NodeAgent(int(found[1]), int(found[2]))
    if found := _UNASSIGNED_NODE_TOKEN.fullmatch(token):
        return UnassignedNode(int(found[1]))
    return None
