"""What the team that runs a target allows there."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct


class PolicyRequest(Struct, frozen=True, kw_only=True):
    """What the policies of a target are to require, in addition to what every run there needs."""

    fabrics: Sequence[str] = ()
    """Fabrics that runs may use; none means any."""
    labels: Sequence[str] = ()
    """Labels that pods with GPUs must have, such as `team`."""
    enforce: bool = True
    """Whether the cluster refuses, or only warns."""
