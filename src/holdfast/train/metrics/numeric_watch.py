"""Judges the numbers of one rank's steps: NaN and infinities in loss, gradients and weights, and spikes.

A loss or gradient that is no number does no harm if the loop skips its update, as loss scaling does. So weights and
optimizer state decide: once they are no numbers, nothing that follows is right, and the rank ends after that step. It
began on the rank whose own gradient, before the reduction, is no number: others only receive it. Where gradients are
seen after the reduction, as in FSDP, the loss tells, unless the loop has averaged it over ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from holdfast.events import NumericFault
from holdfast.findings import Finding, Severity, replica_suffix
from holdfast.metrics.spikes import Spike, SpikeDetector
from holdfast.protocol.rank_messages import NumericFaultReported
from holdfast.protocol.watch_levels import WatchLevel
from holdfast.train.metrics.gradient_guard import SUM, GradientGuard, Place, is_sound

REPORT_AGAIN_S = 60.0
"""Minimum seconds between two reports about gradients alone: loss scaling has some in a row at its start."""

_SPIKING = ("loss", "grad_norm")


class NumericWatch:
    """Watches one rank."""

    def __init__(
        self,
        *,
        rank: int,
        replica: int = 0,
        gradients: GradientGuard | None = None,
        non_finite: WatchLevel = WatchLevel.ACT,
        spikes: WatchLevel = WatchLevel.WARN,
    ) -> None:
        """Without `gradients` only the numbers that the loop reports are judged."""
        self._rank = rank
        self._who = f"rank {rank}{replica_suffix(replica)}"
        self._gradients = gradients
        self._acts = non_finite is WatchLevel.ACT
        self._reported_at = -math.inf
        # The gradient norm is the same on all ranks.
        watched = () if spikes is WatchLevel.OFF else _SPIKING if rank == 0 else _SPIKING[:1]
        self._held: list[NumericFaultReported] = []
        """Spikes of the gradient norm of the last step: the loss of one rank causes them, which that rank reports."""
        self._spikes = {name: SpikeDetector() for name in watched}

    def check(self, step: int, given: Mapping[str, float]) -> list[NumericFaultReported]:
        """What is wrong with the numbers of a step; at most one says that weights are `damaged`.

        A spike of the gradient norm is reported after the next step: by its reduction all ranks have reported their
        loss of this one, and a decision names the rank whose loss spiked.
        """
        found, self._held = self._held, []
        loss = given.get("loss", 0.0)
        if not math.isfinite(loss) or not is_sound(given.get(SUM)):
            found += self._non_finite(step, loss)
        for name, detector in self._spikes.items():
            value = given.get(name, math.nan)
            if math.isfinite(value) and (spike := detector.add(value)) is not None:
                (found if name == "loss" else self._held).append(self._spike(step, name, spike))
        return found

    def _non_finite(self, step: int, loss: float) -> list[NumericFaultReported]:
        guard = self._gradients
        place = guard.gradient() if guard else None
        damage = guard.damage() if guard and self._acts else None
        of_loss = not math.isfinite(loss)
        sees_own = guard is not None and guard.sees_own_gradients
        is_origin = place is not None if sees_own else of_loss
        if damage is not None:
            finding = _damaged(self._who, step, _cause(loss, place), damage, is_origin=is_origin)
        elif not of_loss and place is not None and time.monotonic() - self._reported_at >= REPORT_AGAIN_S:
            self._reported_at = time.monotonic()
            finding = _skipped(self._who, step, place)
        else:
            return []  # a loss is reported by nan_guard.py
        return [
            NumericFaultReported(
                step=step,
                fault=NumericFault.NON_FINITE,
                quantity="loss" if of_loss else "gradient",
                parameter_group=str(place or (damage and damage[1]) or ""),
                damaged=damage is not None,
                is_origin=is_origin,
                finding=finding,
            )
        ]

    def _spike(self, step: int, name: str, spike: Spike) -> NumericFaultReported:
        times = f"{spike.value / spike.median:.1f} times its running median" if spike.median > 0 else "far above it"
        what = f"of {self._who} is {spike.value:.6g} after step {step}, {times}"
        finding = (_loss_spike if name == "loss" else _gradient_spike)(self._who, what, spike.median)
        of_loss = name == "loss"  # the norm is that of all ranks, whichever reports it
        quantity = "loss" if of_loss else "gradient"
        return NumericFaultReported(
            step=step, fault=NumericFault.SPIKE, quantity=quantity, is_origin=of_loss, finding=finding
        )


_IF_IT_STAYS = (
    "Nothing, if it recovers. If it stays high: resume from the last checkpoint before it with a lower learning rate, "
    "clipped gradients, or without the samples of that step."
)


def _loss_spike(who: str, what: str, median: float) -> Finding:
    return Finding(
        code="loss-spike",
        severity=Severity.WARNING,
        what=f"the loss {what}",
        where=who,
        evidence=(f"running median {median:.6g}",),
        remedy=_IF_IT_STAYS,
    )


def _gradient_spike(who: str, what: str, median: float) -> Finding:
    return Finding(
        code="gradient-spike",
        severity=Severity.WARNING,
        what=f"the gradient norm {what}",
        where=who,
        evidence=(f"running median {median:.6g}",),
        remedy=_IF_IT_STAYS,
    )


def _cause(loss: float, place: Place | None) -> str:
    """Which of the rank's own numbers of the step are not finite."""
    gradient = "" if place is None else f"its gradient of parameter group {place} is not finite"
    if math.isfinite(loss):
        return f"{gradient}, its loss is" if gradient else "its loss and gradients are finite"
    return ", ".join(filter(None, (f"its loss is {loss:g}", gradient)))


def _damaged(who: str, step: int, cause: str, damage: tuple[str, Place], *, is_origin: bool) -> Finding:
    quantity, place = damage
    what = "weights are" if quantity == "weights" else "optimizer state is"
    first = "was the first" if is_origin else "is among the first"
    return Finding(
        code="weights-not-finite",
        what=f"after step {step} {what} no longer finite, and {who} {first}",
        where=who,
        evidence=(f"after step {step}: {cause}", f"not finite now: {quantity} of parameter group {place}"),
        remedy="Nothing at the first time: the run resumes from its last checkpoint, which is of before. If it comes "
        "again at the same step, lower the learning rate, clip gradients, or leave out the samples of that step; if "
        "it comes on the same rank at another step, suspect its device.",
    )


def _skipped(who: str, step: int, place: Place) -> Finding:
    return Finding(
        code="gradient-not-finite",
        severity=Severity.INFO,
        what=f"a gradient of {who} is not finite after step {step}, and weights are: the update was skipped",
        where=who,
        evidence=(f"gradient of parameter group {place}",),
        remedy="Nothing: loss scaling does this until its scale fits.",
    )
