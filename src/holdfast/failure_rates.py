"""Published failure rates of node fleets, and the number of standbys they call for; pure.

A run's own failures are in train/checkpoint/interval.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

DAY_S = 86_400.0


@dataclass(frozen=True, kw_only=True)
class FailureRate:
    """How often nodes of a published fleet interrupted a job."""

    fleet: str
    per_1000_node_days: float
    source: str


FAILURE_RATES = (
    FailureRate(
        fleet="Llama 3",
        per_1000_node_days=3.8,
        source="The Llama 3 Herd of Models, 2024: 419 unexpected interruptions of 2,048 nodes in 54 days",
    ),
    FailureRate(
        fleet="RSC-1",
        per_1000_node_days=6.5,
        source="Kokolis et al., Revisiting Reliability in Large-Scale Machine Learning Research Clusters, 2024",
    ),
    FailureRate(fleet="RSC-2", per_1000_node_days=2.3, source="Kokolis et al., 2024, as for RSC-1"),
    FailureRate(
        fleet="ByteRobust",
        per_1000_node_days=1.2,
        source="Wan et al., Robust LLM Training Infrastructure at ByteDance, 2025",
    ),
)
DEFAULT_RATE = next(prior for prior in FAILURE_RATES if prior.fleet == "RSC-1")
"""A research cluster's rate: the most cautious of the four."""

STANDBY_QUANTILE, STANDBY_WINDOW_S = 0.99, DAY_S
"""In 99 of 100 windows no more nodes fail than there are standbys; a window is the time that a repair may take."""


def standby_count(nodes: int) -> int:
    """The default number of standbys of a run: the P99 of Binomial(nodes, failures of a node per day).

    Source: ByteRobust (Wan et al., 2025), which sizes its pool of warm standbys this way.
    """
    fails = -math.expm1(-DEFAULT_RATE.per_1000_node_days / 1000 * STANDBY_WINDOW_S / DAY_S)
    return binomial_quantile(nodes, fails, STANDBY_QUANTILE)


def binomial_quantile(trials: int, chance: float, quantile: float) -> int:
    """The smallest k such that at most k of the trials succeed in `quantile` of all cases; chance < 1, quantile < 1."""
    # In logarithms: the probability that none of 100,000 succeeds is below the smallest float.
    within = 0.0
    for count in range(trials + 1):
        ways = math.lgamma(trials + 1) - math.lgamma(count + 1) - math.lgamma(trials - count + 1)
        odds = count * math.log(chance) if count else 0.0
        within += math.exp(ways + odds + (trials - count) * math.log1p(-chance))
        if within >= quantile:
            return count
    return trials
