"""Decides from the replicas' digests which of them differ from the majority, and describes it.

Pure. Digests: state_digest.py; what follows: replica_strategy.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from holdfast.findings import Finding, Owner, Severity, replica_suffix

Votes = Sequence[Mapping[int, int]]
"""For each rank, the digest of each replica, by the replica's number."""


class Divergence(NamedTuple):
    """Replicas whose state differs."""

    step: int
    """Steps finished when they were compared."""
    votes: Votes
    outliers: dict[int, list[int]]
    """For each replica that differs from the majority, the ranks that do."""
    has_majority: bool
    """Whether at least one replica is with the majority on all of its ranks."""


def compare(step: int, votes: Votes) -> Divergence | None:
    """How the replicas differ after this step; None if they are equal."""
    if all(len(set(digests.values())) == 1 for digests in votes):
        return None
    outliers: dict[int, list[int]] = {}
    decided = True
    for rank, digests in enumerate(votes):
        (common, count), *_ = Counter(digests.values()).most_common(1)
        decided = decided and 2 * count > len(digests)
        for replica, digest in digests.items():
            if digest != common:
                outliers.setdefault(replica, []).append(rank)
    return Divergence(step, votes, outliers, has_majority=decided and len(outliers) < len(votes[0]))


def restored(diverged: Divergence, replica: int) -> Finding:
    """Finding of a replica that differs from the majority and receives its state."""
    ranks = diverged.outliers[replica]
    return Finding(
        code="replicas-diverged",
        severity=Severity.WARNING,
        what=f"after step {diverged.step} replica {replica} held other weights or optimizer state than the majority "
        "of replicas: it receives theirs",
        where=f"{_ranks(ranks)} of replica {replica}",
        evidence=_evidence(diverged),
        remedy="Nothing at the first time. If a rank of its node differs again within recovery.suspect_window_s, the "
        "node is replaced: its device computes or stores wrongly.",
        owner=Owner.CLUSTER,
    )


def unresolved(diverged: Divergence, agreed_step: int) -> Finding:
    """Finding that ends the program: without a majority, no replica is known to be right."""
    replicas = sorted(diverged.votes[0])
    return Finding(
        code="replicas-diverged",
        what=f"after step {diverged.step} replicas {', '.join(map(str, replicas))} held different weights or optimizer "
        "state, and no majority says which is right: the ranks end, to resume from the newest checkpoint up to their "
        "last agreement",
        where=", ".join(
            _ranks([rank]) for rank, digests in enumerate(diverged.votes) if len(set(digests.values())) > 1
        ),
        evidence=(f"they last agreed after step {agreed_step}; later checkpoints were set aside", *_evidence(diverged)),
        remedy="Nothing at the first time. If it comes again at the same step, the program changes weights differently "
        "in each replica: look for updates outside optimizer.step, and for parameters that the session's model lacks. "
        "If it comes at any step, a device computes wrongly: run `holdfast check`. Of three replicas the majority "
        "continues.",
    )


def ranks_differ(step: int, replica: int, digests: Sequence[int]) -> Finding:
    """Finding that ends the program: the ranks inside each replica differ, though the replicas are equal."""
    return Finding(
        code="ranks-diverged",
        what=f"after step {step} the ranks of replica {replica} hold different weights, which DDP must keep equal",
        where=_ranks([rank for rank, digest in enumerate(digests) if digest != digests[0]]) + replica_suffix(replica),
        evidence=tuple(f"rank {rank} has digest {digest % 2**64:016x}" for rank, digest in enumerate(digests[:8])),
        remedy="Look for weights that are set after DistributedDataParallel was made, for gradients that are never "
        "reduced, such as those of a last micro-batch under `no_sync`, and for updates outside optimizer.step.",
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _evidence(diverged: Divergence) -> tuple[str, ...]:
    """The digests of the ranks that differ, for at most eight ranks."""
    differing = [(rank, each) for rank, each in enumerate(diverged.votes) if len(set(each.values())) > 1]
    return tuple(
        f"rank {rank}: "
        + ", ".join(f"replica {replica} has digest {digest % 2**64:016x}" for replica, digest in sorted(each.items()))
        for rank, each in differing[:8]
    )
