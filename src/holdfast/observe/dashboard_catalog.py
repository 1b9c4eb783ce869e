"""The tables of Grafana's dashboards: all runs, one run, its nodes. Pure.

Units are Grafana's. `$run` is the run that a user has chosen, `$__rate_interval` Grafana's range for a rate.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from holdfast.observe.alert_catalog import RUNNING
from holdfast.observe.exported_metrics import PREFIX


class PanelKind(StrEnum):
    """Grafana's type of a panel."""

    STAT = "stat"
    LINES = "timeseries"
    STATES = "state-timeline"
    TABLE = "table"


class Query(NamedTuple):
    """One query of a panel."""

    expression: str
    legend: str = ""


class Panel(NamedTuple):
    """One panel."""

    title: str
    kind: PanelKind
    unit: str
    queries: tuple[Query, ...]
    help: str = ""
    width: int = 8
    """Of 24 columns."""
    is_stacked: bool = False


class DashboardKind(NamedTuple):
    """One dashboard."""

    uid: str
    title: str
    panels: tuple[Panel, ...]
    has_run: bool = True
    """Whether it shows one run, which the user chooses."""


def _of_run(metric: str, more: str = "") -> str:
    return f'{PREFIX}{metric}{{run="$run"{more}}}'


def _quantile(share: float, histogram: str, by: str) -> str:
    series = _of_run(f"{histogram}_bucket")
    return f"histogram_quantile({share}, sum by (le, {by}) (rate({series}[$__rate_interval])))"


def _on_node(metric: str, host: str) -> str:
    """An exporter's series of the run's machines, whose names are in its label `host`."""
    info = f'label_replace({_of_run("node_info")}, "{host}", "$1", "hostname", "(.*)")'
    return f"{metric} and on ({host}) {info}"


_POD_HOSTNAME = "(.+?)(?:-[a-z0-9]{5})?"
"""A pod's hostname is its name, without the suffix that a Job adds."""


def _of_pods(metric: str) -> str:
    """Series of kube-state-metrics that are not 0, of the run's pods."""
    return (
        f'label_replace({metric}, "hostname", "$1", "pod", "{_POD_HOSTNAME}") and on (hostname) {_of_run("node_info")}'
    )


_FLEET = DashboardKind(
    "holdfast-fleet",
    "holdfast: all runs",
    (
        Panel(
            "Runs by phase",
            PanelKind.STAT,
            "short",
            (Query(f"sum by (phase) ({PREFIX}run_phase) > 0", "{{phase}}"),),
            width=12,
        ),
        Panel(
            "Nodes with an agent",
            PanelKind.STAT,
            "short",
            (Query(f'sum ({PREFIX}run_nodes{{phase="joined"}})', "joined"), Query(f"sum ({PREFIX}run_nodes)", "all")),
            width=6,
        ),
        Panel("Degraded runs", PanelKind.STAT, "short", (Query(f"sum ({PREFIX}run_degraded)"),), width=6),
        Panel("ETTR", PanelKind.LINES, "percentunit", (Query(f"{PREFIX}run_ettr_ratio", "{{run}}"),), width=12),
        Panel(
            "Tokens per second",
            PanelKind.LINES,
            "short",
            (Query(f"max by (run) ({PREFIX}replica_tokens_per_second)", "{{run}}"),),
            width=12,
        ),
        Panel(
            "Failures",
            PanelKind.TABLE,
            "short",
            (Query(f"sum by (run, code) ({PREFIX}run_failures_total)"),),
            "`holdfast explain CODE` says more.",
            width=12,
        ),
        Panel(
            "Age of the last checkpoint",
            PanelKind.LINES,
            "s",
            (
                Query(
                    f"(time() - {PREFIX}run_checkpoint_timestamp_seconds) and on (run) {RUNNING}",
                    "{{run}}",
                ),
            ),
            "What a failure now would cost each run.",
            width=12,
        ),
    ),
    has_run=False,
)

_RUN = DashboardKind(
    "holdfast-run",
    "holdfast: one run",
    (
        Panel("Phase", PanelKind.STATES, "short", (Query(f"{_of_run('run_phase')} == 1", "{{phase}}"),), width=12),
        Panel("ETTR", PanelKind.STAT, "percentunit", (Query(_of_run("run_ettr_ratio")),), width=4),
        Panel("Step", PanelKind.STAT, "short", (Query(f"max ({_of_run('replica_step')})"),), width=4),
        Panel("Restarts", PanelKind.STAT, "short", (Query(_of_run("run_restarts_total")),), width=4),
        Panel("Loss", PanelKind.LINES, "short", (Query(_of_run("step_loss"), "replica {{replica}}"),)),
        Panel("Gradient norm", PanelKind.LINES, "short", (Query(_of_run("step_grad_norm"), "replica {{replica}}"),)),
        Panel(
            "Tokens per second",
            PanelKind.LINES,
            "short",
            (Query(_of_run("replica_tokens_per_second"), "replica {{replica}}"),),
        ),
        Panel(
            "Time of a step",
            PanelKind.LINES,
            "s",
            (
                Query(_quantile(0.5, "replica_step_seconds", "replica"), "median, replica {{replica}}"),
                Query(_quantile(0.99, "replica_step_seconds", "replica"), "99 %, replica {{replica}}"),
            ),
        ),
        Panel(
            "MFU",
            PanelKind.LINES,
            "percentunit",
            (
                Query(_of_run("step_mfu_full_ratio"), "full attention"),
                Query(_of_run("step_mfu_causal_ratio"), "causal"),
            ),
            "Model FLOPs utilisation. Empty on devices whose peak is not known, such as CPUs.",
        ),
        Panel(
            "Where the time went",
            PanelKind.LINES,
            "s",
            (Query(f"{_of_run('run_time_seconds')} > 0", "{{category}}"),),
            is_stacked=True,
        ),
        Panel(
            "Nodes",
            PanelKind.LINES,
            "short",
            (Query(f"{_of_run('run_nodes')} > 0", "{{phase}}"),),
            is_stacked=True,
        ),
        Panel(
            "Ranks",
            PanelKind.LINES,
            "short",
            (Query(f"sum by (phase) ({_of_run('replica_ranks')}) > 0", "{{phase}}"),),
            is_stacked=True,
        ),
        Panel(
            "Age of the last checkpoint",
            PanelKind.LINES,
            "s",
            (Query(f"time() - {_of_run('run_checkpoint_timestamp_seconds')}", "age"),),
        ),
        Panel("Size of the last checkpoint", PanelKind.LINES, "bytes", (Query(_of_run("run_checkpoint_size_bytes")),)),
        Panel("Failures", PanelKind.TABLE, "short", (Query(f"sum by (code) ({_of_run('run_failures_total')})"),)),
        Panel(
            "Findings",
            PanelKind.TABLE,
            "short",
            (Query(f"sum by (code, severity) ({_of_run('run_findings_total')})"),),
            "`holdfast explain CODE` says more.",
        ),
        Panel(
            "Time of a recovery",
            PanelKind.STAT,
            "s",
            (Query(f"{_of_run('run_recovery_seconds_sum')} / {_of_run('run_recovery_seconds_count')}"),),
            "The mean, from a failure to the end of the next step.",
        ),
    ),
)

_NODES = DashboardKind(
    "holdfast-nodes",
    "holdfast: the nodes of a run",
    (
        Panel(
            "Agents",
            PanelKind.STATES,
            "short",
            (
                Query(
                    f"{_of_run('node_up')} * on (node) group_left (hostname) {_of_run('node_info')}",
                    "node {{node}}, {{hostname}}",
                ),
            ),
            width=24,
        ),
        Panel(
            "Peak memory of a rank's process",
            PanelKind.LINES,
            "bytes",
            (Query(_of_run("step_host_memory_peak_bytes")),),
        ),
        Panel("Peak memory of a GPU", PanelKind.LINES, "bytes", (Query(_of_run("step_memory_peak_bytes")),)),
        Panel(
            "GPU utilisation",
            PanelKind.LINES,
            "percent",
            (Query(_on_node("DCGM_FI_DEV_GPU_UTIL", "Hostname"), "{{Hostname}}, GPU {{gpu}}"),),
            "From the DCGM exporter of these machines.",
        ),
        Panel(
            "GPU temperature",
            PanelKind.LINES,
            "celsius",
            (Query(_on_node("DCGM_FI_DEV_GPU_TEMP", "Hostname"), "{{Hostname}}, GPU {{gpu}}"),),
            "From the DCGM exporter of these machines.",
        ),
        Panel(
            "Pods",
            PanelKind.STATES,
            "short",
            (Query(_of_pods("(kube_pod_status_phase == 1)"), "{{pod}}: {{phase}}"),),
            "On Kubernetes, from kube-state-metrics.",
        ),
        Panel(
            "Machines of the pods that are not as they should be",
            PanelKind.STATES,
            "short",
            (
                Query(
                    '(kube_node_status_condition{condition!="Ready", status="true"} == 1 or '
                    'kube_node_status_condition{condition="Ready", status!="true"} == 1) '
                    f"and on (node) ({_of_pods('kube_pod_info')})",
                    "{{node}}: {{condition}} {{status}}",
                ),
            ),
            "Conditions of nodes on Kubernetes, from kube-state-metrics.",
        ),
    ),
)

DASHBOARDS: tuple[DashboardKind, ...] = (_FLEET, _RUN, _NODES)
"""All dashboards."""
