"""Runs the ladder: job files that train the same model with one thing more each, compared with the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from holdfast import api
from holdfast.accept.site import ObservedRun, Site
from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.findings import Finding, Severity
from holdfast.job.loader import LoadedJob
from holdfast.report.formatting import percentage, size
from holdfast.report.run_comparison import step_time_ratio

DEADLINE_S = 900.0
UNUSED = "not-used"
"""Beginning of the codes of fields that a target ignores: a rung with such a field would show nothing new there."""
MEMORY = ("memory_peak_bytes", "host_memory_peak_bytes")
MFU, TFLOPS = "mfu_full", "tflops_full"


class Rung(Struct, frozen=True, kw_only=True):
    """What came of one job file."""

    name: str
    status: str
    """`succeeded`, `failed` or `not applicable`."""
    why: str = ""
    """Why it did not succeed, or does not apply to the target."""
    run: str = ""
    duration_s: float = 0.0
    """From the request to the end."""
    step_s: float = 0.0
    """Median time of a step."""
    first_loss: float | None = None
    last_loss: float | None = None
    grad_norm: float | None = None
    mfu: str = ""
    tokens_per_s: float = 0.0
    tflops: float | None = None
    """Per device."""
    memory: str = ""
    """Peak of a device, or of a rank's process without one."""
    ratio: str = ""
    """Time of a step, relative to the first rung that succeeded, with its interval; `1` for that one."""
    floor: str = ""
    """The same between two halves of the first rung: what chance does."""

    @property
    def has_failed(self) -> bool:
        return self.status == "failed"


def read_rungs(folder: Path) -> tuple[Path, ...]:
    """The job files of a ladder, by name; raises HoldfastError if there is none."""
    files = tuple(sorted(folder.glob("*.yaml")))
    if not files:
        raise failure(
            "ladder-not-found",
            f"there is no job file in {folder}",
            exit_code=ExitCode.NOT_FOUND,
            where=str(folder),
            remedy="Name a folder of job files, such as `examples/ladder` of holdfast's repository.",
        )
    return files


def climb(
    files: Sequence[Path], site: Site, *, overrides: Sequence[str] = (), show: Callable[[Rung], object]
) -> tuple[Rung, ...]:
    """Run each job file, one after the other."""
    rungs: list[Rung] = []
    first: ObservedRun | None = None
    for path in files:
        loaded = api.load(path, overrides=overrides)
        if refused := why_not(loaded, site, path.parent):
            rung = Rung(name=path.stem, status="not applicable", why=refused.what)
        else:
            site.log(f"running {path.name}")
            try:
                observed = site.observe(api.start(loaded, site.target, base=path.parent), deadline_s=DEADLINE_S)
            except HoldfastError as error:
                rung = Rung(name=path.stem, status="failed", why=error.findings[0].what)
            else:
                rung = measure(path.stem, observed, first)
                first = first or (None if rung.has_failed else observed)
        rungs.append(rung)
        show(rung)
    return tuple(rungs)


def why_not(loaded: LoadedJob, site: Site, base: Path) -> Finding | None:
    """Why a target cannot run a rung, or would ignore what it adds; None if it can."""
    try:
        found = api.check(loaded, site.target, base=base)
    except HoldfastError as error:
        return error.findings[0]
    unfit = (each for each in found if each.severity is Severity.ERROR or each.code.startswith(UNUSED))
    return next(unfit, None)


def measure(name: str, run: ObservedRun, first: ObservedRun | None) -> Rung:
    """The figures of one rung; without `first`, the first rung that succeeded, it is that one."""
    failed, record = run.problem, run.record
    steps = [event for event in run.steps if event.replica == 0]
    losses = [event.metrics["loss"] for event in steps if "loss" in event.metrics]
    last = steps[-1].metrics if steps else {}
    times = sorted((event.ended - event.started) / event.steps for event in steps)
    step_s = times[len(times) // 2] if times else 0.0
    memory = next((last[metric] for metric in MEMORY if metric in last), None)
    ratio = step_time_ratio(first.record, record) if first else None
    shown = "1" if first is None and failed is None else ""
    return Rung(
        name=name,
        status="failed" if failed else "succeeded",
        why=failed.what if failed else "",
        run=run.folder.run_id,
        duration_s=record.status.account(record.last_at).total_s,
        step_s=step_s,
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        grad_norm=last.get("grad_norm"),
        mfu=percentage(last[MFU]) if MFU in last else "",
        tokens_per_s=last.get("tokens", 0.0) / step_s if step_s else 0.0,
        tflops=last.get(TFLOPS),
        memory=size(int(memory)) if memory is not None else "",
        ratio=f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio else shown,
        floor=f"{ratio.floor_low:.2f} to {ratio.floor_high:.2f}" if ratio else "",
    )


HEAD = ("rung", "status", "time", "loss", "step", "ratio", "chance", "tokens/s", "MFU", "TFLOP/s", "gradient", "memory")


def row(rung: Rung) -> tuple[str, ...]:
    """The rung as text, under `HEAD`."""
    if rung.status == "not applicable":
        return (rung.name, rung.status, *[""] * (len(HEAD) - 2))
    return (
        rung.name,
        rung.status,
        f"{rung.duration_s:.0f} s",
        "" if rung.first_loss is None or rung.last_loss is None else f"{rung.first_loss:.3f} → {rung.last_loss:.3f}",
        f"{rung.step_s * 1e3:.0f} ms",
        rung.ratio,
        rung.floor,
        f"{rung.tokens_per_s:,.0f}",
        rung.mfu,
        "" if rung.tflops is None else f"{rung.tflops:.3g}",
        "" if rung.grad_norm is None else f"{rung.grad_norm:.2f}",
        rung.memory,
    )
