"""Decides which of the data-parallel ranks of one replica holds or computes wrong numbers, and describes it.

Pure. Ranks that hold equal weights have equal digests, and compute bit-exact gradients from the same samples.
Digests: state_digest.py; repeated passes: step_replay.py; what follows: rank_verifier.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

from holdfast.findings import Finding, Owner, Severity

MAX_DIGESTS = 8
"""Digests in a finding's evidence."""


class Corruption(NamedTuple):
    """Ranks that differ, of which at least one is wrong."""

    suspects: tuple[int, ...]
    """The ranks that may be wrong."""
    certain: bool
    """Whether the other ranks prove that the suspects are wrong."""


def outvoted(digests: Sequence[int]) -> Corruption | None:
    """The ranks whose digest differs from that of the majority; None if all are equal."""
    (common, count), *others = Counter(digests).most_common()
    if not others:
        return None
    if 2 * count <= len(digests):
        return Corruption(tuple(range(len(digests))), certain=False)
    return Corruption(tuple(rank for rank, digest in enumerate(digests) if digest != common), certain=True)


def partner_distance(ranks: int, ranks_per_node: int) -> int:
    """How many ranks further the partner is that repeats a rank's pass: on another node if there are several.

    Following partners leads through three ranks or more, where there are so many: then each rank has two neighbours.
    """
    first = ranks_per_node % ranks or 1
    distances = (first + more for more in range(ranks) if (first + more) % ranks)
    return next((each % ranks for each in distances if ranks // gcd(ranks, each) > 2), first)


class Repetition(NamedTuple):
    """How the passes of one rank, repeated by itself and by its partner, compare with the first one."""

    by_itself: bool
    by_partner: bool


def judge_repetitions(repeated: Sequence[Repetition], distance: int) -> Corruption | None:
    """The ranks that computed wrongly; None if no rank did, or if the program does not repeat its own passes.

    A rank that does not repeat its own pass was wrong once. A rank that always computes wrongly repeats itself, but
    differs from its partner, and from the rank whose partner it is: it is the only one in both pairs.
    """
    ranks = len(repeated)
    unlike = [rank for rank, each in enumerate(repeated) if not each.by_itself]
    pairs = [(rank, (rank + distance) % ranks) for rank, each in enumerate(repeated) if not each.by_partner]
    if not pairs or len(unlike) > 1:
        return None
    if unlike and all(unlike[0] in pair for pair in pairs):
        return Corruption((unlike[0],), certain=True)
    involved = Counter(rank for pair in pairs for rank in pair)
    common = [rank for rank, count in involved.items() if count == len(pairs)]
    if len(pairs) > 1 and len(common) == 1:
        return Corruption((common[0],), certain=True)
    return Corruption(tuple(sorted(involved)), certain=False)


def corrupted(rank: int, step: int, agreed_step: int, quantity: str, evidence: Sequence[str]) -> Finding:
    """Finding of a rank that the others prove to be wrong."""
    verb = "computed other" if quantity == "gradients" else "held other"
    return Finding(
        code="silent-corruption",
        what=f"after step {step} rank {rank} {verb} {quantity} than the other ranks, and nothing reported an error: "
        f"the ranks end, to resume from the newest checkpoint up to step {agreed_step}",
        where=f"rank {rank}",
        evidence=(f"all ranks last agreed after step {agreed_step}", *evidence),
        remedy="Test the memory and the device of its node before it is used again: `holdfast check`.",
        owner=Owner.CLUSTER,
    )


def differ(suspects: Sequence[int], step: int, agreed_step: int, quantity: str, evidence: Sequence[str]) -> Finding:
    """Finding of ranks that differ, without a proof which of them is wrong."""
    return Finding(
        code="ranks-diverged",
        what=f"after step {step} ranks {', '.join(map(str, suspects))} hold or compute different {quantity}, and no "
        f"majority says which is right: the ranks end, to resume from the newest checkpoint up to step {agreed_step}",
        where=f"ranks {', '.join(map(str, suspects))}",
        evidence=(f"all ranks last agreed after step {agreed_step}", *evidence),
        remedy="Nothing at the first time: the nodes are checked. With three ranks or more the majority decides.",
        owner=Owner.CLUSTER,
    )


def never_equal(digests: Sequence[int]) -> Finding:
    """Finding of ranks whose weights differ from the start, so that they cannot be compared."""
    return Finding(
        code="ranks-diverged",
        severity=Severity.WARNING,
        what="the ranks hold different weights from the start, although DDP wraps the model: they are not compared",
        evidence=tuple(digest_lines(digests)),
        remedy="Look for weights that are set after DistributedDataParallel was made.",
    )


def not_repeatable(why: str) -> Finding:
    """Finding of a program whose passes cannot be repeated."""
    return Finding(
        code="step-not-repeatable",
        severity=Severity.INFO,
        what="the ranks' forward and backward passes are not repeated to find wrong gradients; weights and optimizer "
        "state are still compared",
        evidence=(why,),
        remedy="Nothing, unless you want it: `torch.use_deterministic_algorithms(True)`, and a loss that depends on "
        "weights through the model's forward pass alone.",
    )


def digest_lines(digests: Sequence[int]) -> list[str]:
    """The digests of ranks as lines of evidence; of many, those of ranks that differ from the most common one first."""
    common = Counter(digests).most_common(1)[0][0]
    order = sorted(range(len(digests)), key=lambda rank: (digests[rank] == common, rank))
    return [f"rank {rank} has digest {digests[rank] % 2**64:016x}" for rank in sorted(order[:MAX_DIGESTS])]
