"""Published failure rates of node fleets, and the standbys and the checkpoint interval they call for; pure.

Young's formula gives the interval. With C seconds that a save stalls the loop and M seconds between failures, saving
every sqrt(2 C M) seconds makes the time spent on saves equal to the work lost to failures (J. W. Young, CACM 17 (9),
1974). J. T. Daly's further terms (FGCS 22 (3), 2006) matter only where C is near M; a stall is far shorter.
"""

from __future__ import annotations

import math

from msgspec import Struct

DAY_S = 86_400.0


class FailureRate(Struct, frozen=True, kw_only=True):
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


class FailureHistory(Struct, frozen=True, kw_only=True):
    """A run's failures so far."""

    nodes: int
    """Current number of nodes."""
    failures: int
    """Attempts that have ended."""
    node_s: float
    """Seconds of training, summed over nodes."""


def mtbf_s(past: FailureHistory) -> float:
    """Mean seconds between failures of the whole run; the prior counts as one failure, in addition to the run's own."""
    prior_node_s = 1000 / DEFAULT_RATE.per_1000_node_days * DAY_S
    return (prior_node_s + past.node_s) / (1 + past.failures) / past.nodes


def young_interval_s(past: FailureHistory, *, cost_s: float, took_s: float) -> float:
    """Seconds between the starts of two saves that stall the loop `cost_s` and complete after `took_s`."""
    return max(math.sqrt(2 * cost_s * mtbf_s(past)), took_s)
