"""The command `profile`: where a step's time and memory go."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.common_options import LOCAL, OutputOption, RunArgument, RunTargetOption, WaitOption
from holdfast.cli.output import Output, console, print_result, print_rich
from holdfast.errors import ExitCode, failure

if TYPE_CHECKING:
    from holdfast.run_dir import RunDir
    from holdfast.run_profile import StepProfile


def profile(
    run: RunArgument = None,
    on: RunTargetOption = LOCAL,
    ranks: Annotated[
        str,
        typer.Option(
            "--ranks", metavar="RANKS", help="Ranks that keep a trace, such as 0,5; default: 0, slowest, fastest."
        ),
    ] = "",
    memory: Annotated[
        bool, typer.Option("--memory", help="These ranks also keep a snapshot of their GPU memory.")
    ] = False,
    nsys: Annotated[
        bool,
        typer.Option(
            "--nsys", help="Print the command that starts the ranks under Nsight Systems, and profile nothing."
        ),
    ] = False,
    timeout_s: WaitOption = 600.0,
    output: OutputOption = Output.TEXT,
) -> None:
    """Profile a few steps of a run: where does the time go?

    Prints by how much a step could be faster, and keeps a trace for Perfetto.
    The run continues.
    """
    from holdfast import api
    from holdfast.cli.finding_text import render_finding
    from holdfast.metrics.metric_catalog import ON_REQUEST
    from holdfast.metrics.metric_text import BREAKDOWN, format_metrics

    chosen = _rank_numbers(ranks)
    found = api.find_run(run, on)
    if nsys:
        _print_nsys(found, output)
        return
    with console(stderr=True).status(f"profiling the next steps of {found.run_id}, for at most {timeout_s:g} s"):
        found_profile = api.profile_steps(found, ranks=chosen, memory=memory, timeout_s=timeout_s)
    breakdown = found_profile.breakdown
    parts = {name: spent_s for name, spent_s in breakdown.items() if name in ON_REQUEST}
    shares = ", ".join(format_metrics(breakdown, BREAKDOWN))
    print_result(
        output,
        {
            "run": found.run_id,
            "step": found_profile.step,
            "metrics": parts,
            "trace": str(found_profile.trace) if found_profile.trace else None,
            "summary": found_profile.summary,
            "failures": found_profile.failures,
            "memory": [str(path) for path in found_profile.memory],
            "findings": [finding] if (finding := found_profile.memory_finding) else [],
        },
        "\n".join(
            [
                f"step {found_profile.step} of {found.run_id}: {shares}",
                *found_profile.summary,
                *(f"no trace of {each}" for each in found_profile.failures),
                *([f"trace: {found_profile.trace}{_clocks(found_profile)}"] if found_profile.trace else []),
                *(f"memory: {path}, for https://pytorch.org/memory_viz" for path in found_profile.memory),
            ]
        ),
    )
    if finding and output is Output.TEXT:
        print_rich(render_finding(finding))


def _print_nsys(run: RunDir, output: Output) -> None:
    from holdfast import api
    from holdfast.launch.nsys import DELAY_S, DURATION_S

    rendered = api.nsys_command(run)
    reports = f"reports on the nodes: {rendered.output}.nsys-rep, {DURATION_S} s each, from {DELAY_S} s after a start"
    print_result(
        output,
        {"run": run.run_id, "command": rendered.argv, "output": rendered.output},
        f"holdfast run --set {shlex.quote(f'command={shlex.join(rendered.argv)}')}\n{reports}",
    )


def _clocks(found: StepProfile) -> str:
    """How well the clocks of the ranks are aligned."""
    errors_ns = [offset.error_ns for offset in found.offsets.values() if offset.collectives]
    return f" (clocks aligned to {max(errors_ns) / 1e6:.2g} ms)" if errors_ns else ""


def _rank_numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(each) for each in text.split(",") if each.strip())
    except ValueError:
        what = f"`--ranks {text}` is no list of ranks"
        raise failure("bad-ranks", what, exit_code=ExitCode.USAGE, remedy="Write numbers, such as 0,5.") from None
