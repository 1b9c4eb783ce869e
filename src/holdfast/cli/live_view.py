"""Renders a running run: headline, nodes and ranks, latest events and findings.

The loop that feeds it is in follow.py; the data is in report/run_status.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from msgspec import Struct
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from holdfast.cli.event_text import EventLineFilter, describe
from holdfast.cli.finding_text import render_recent
from holdfast.events import AnyEvent
from holdfast.metrics.metric_text import BREAKDOWN, DETAILS, format_metrics, format_number
from holdfast.report.formatting import count, duration, format_numbers, sanitize, short_digest
from holdfast.report.rank_table import RankPhase, RankStatus
from holdfast.report.run_status import NodePhase, NodeStatus, ReplicaStatus, RunPhase, RunStatus
from holdfast.report.run_summary import format_ettr
from holdfast.report.status_reducer import update_status
from holdfast.report.world_size_text import format_world_size

MOST_ROWS = 16
"""Maximum rows of the node table; with more ranks than this, each node gets one row for all its ranks."""
LINES_SHOWN = 6
FINDINGS_SHOWN = 2
BAR_WIDTH = 30

_PHASE_STYLES: dict[RunPhase, str] = {
    RunPhase.PENDING: "yellow",
    RunPhase.STARTING: "cyan",
    RunPhase.RUNNING: "green",
    RunPhase.RECOVERING: "bold yellow",
    RunPhase.STOPPING: "yellow",
    RunPhase.SUCCEEDED: "bold green",
    RunPhase.FAILED: "bold red",
    RunPhase.CANCELLED: "bold yellow",
}
_NODE_STYLES: dict[NodePhase, str] = {NodePhase.JOINED: "green", NodePhase.GONE: "red"}
_RANK_STYLES: dict[RankPhase, str] = {
    RankPhase.RUNNING: "green",
    RankPhase.EXITED: "",
    RankPhase.STOPPED: "dim",
}


class LiveView:
    """A live view of a run; takes every event and can be rendered at any time."""

    def __init__(self, clock: Callable[[RunStatus], float] = lambda status: status.now) -> None:
        self._clock = clock
        self._line_filter = EventLineFilter()
        self._lines: deque[str] = deque(maxlen=LINES_SHOWN)
        self._output: RenderableType = Group()
        self._activity = ""
        self.status = RunStatus()

    def on_event(self, event: AnyEvent) -> None:
        self.status = update_status(self.status, event)
        self._lines.extend(self._line_filter.lines_for(event))

    def add_note(self, text: str) -> None:
        """Show a note that is not an event."""
        self._lines.append(text)

    def show_activity(self, text: str) -> None:
        """Show what this machine does for the run; empty for nothing."""
        self._activity = text

    def show_output(self, who: str, lines: list[str]) -> None:
        """Show the latest output of a rank."""
        heading = Text(f"{who} wrote; `holdfast logs -f` shows all ranks", style="dim")
        tail = (Text(f"  {line.expandtabs()}", no_wrap=True, overflow="ellipsis") for line in lines)
        self._output = Group(Text(), heading, *tail)

    def __rich__(self) -> RenderableType:
        recent = Text("\n".join(self._lines), style="dim", no_wrap=True, overflow="ellipsis")
        now = self._clock(self.status)
        findings = render_recent(self.status, now, most=FINDINGS_SHOWN)
        return Group(
            render_status(self.status, now, format_ettr(self.status.account(now))),
            *((Text(self._activity, style="cyan"),) if self._activity else ()),
            self._output,
            Text(),
            recent,
            *findings,
        )


def render_status(status: RunStatus, now: float, ettr: str = "", *, without_controller: bool = False) -> RenderableType:
    """Headline, progress, and the table of nodes and ranks; `ettr` covers the run up to `now`.

    `without_controller`: nothing reports what becomes of it now.
    """
    headline = _headline(status, now, without_controller)
    parts: list[RenderableType] = [headline, *_world_sizes(status), *_progress(status, now, ettr)]
    if fabric := status.worst_fabric:
        parts.append(Text(f"fabric: {sanitize(fabric.line)}", style="bold yellow" if fabric.severity else "dim"))
    if status.waiting_for:
        parts.append(Text(sanitize(status.waiting_for), style="yellow"))
    if status.nodes:
        parts += [Text(), nodes_table(status)]
    return Group(*parts)


def _headline(status: RunStatus, now: float, without_controller: bool) -> Text:
    end = now if status.finished_at is None else status.finished_at
    age = duration(end - status.created_at) if status.created_at is not None else ""
    restarts = count(status.restarts, "restart") if status.restarts else ""
    code = f"code {short_digest(status.code)}" if status.code else ""
    resumed = f"resumes {status.resumed_run} after step {status.resumed_step:,}" if status.resumed_run else ""
    facts = [fact for fact in (age, restarts, resumed, code, _prewarm_text(status)) if fact]
    last_known = "no controller; last known: " if without_controller else ""
    phase = (f"{last_known}{status.phase.value}", "bold yellow" if without_controller else _PHASE_STYLES[status.phase])
    return Text.assemble((status.run, "bold"), "  ", phase, f"  {', '.join(facts)}")


def _prewarm_text(status: RunStatus) -> str:
    """Whether the ranks' next start is prewarmed."""
    warm = sum(len(replica.prewarmed) for replica in status.replicas.values())
    ranks = sum(replica.world_size for replica in status.replicas.values())
    if not warm or status.finished_at is not None:
        return ""
    return "prewarmed" if warm >= ranks else f"{warm} of {ranks} ranks prewarmed"


def _world_sizes(status: RunStatus) -> Iterator[Text]:
    """The current world size of each replica that has lost nodes."""
    for replica in status.replicas.values():
        if (
            replica.world_size_change is not None
            and replica.world_size_change.missing_nodes
            and status.finished_at is None
        ):
            yield Text(format_world_size(replica.world_size_change), style="bold yellow")


def _progress(status: RunStatus, now: float, ettr: str) -> Iterator[Text]:
    lead = status.leader
    if lead.step is None:
        return
    figures = [_step(lead)]
    if lead.loss is not None:
        figures.append(f"loss {format_number(lead.loss)}")
    moves = status.is_progressing(now)
    if moves:
        figures += _speed(status)
    elif still_s := lead.stalled_s(now):
        figures.append(f"no step for {duration(still_s)}")
    if ettr:
        figures.append(ettr)
    yield Text("   ".join(figures))
    if moves and (details := format_metrics(lead.metrics, DETAILS)):
        yield Text("   ".join(details), style="dim")
    for phrase in format_metrics(lead.metrics, BREAKDOWN) if moves else ():
        yield Text(phrase, style="dim")
    if moves and lead.step_times is not None and lead.step_times.ranks > 1:
        yield Text(describe(lead.step_times), style="dim")
    if status.checkpoint is not None:
        ago = "" if status.finished_at else f", {duration(now - status.checkpoint.at)} ago"
        yield Text(f"last checkpoint at step {status.checkpoint.step}{ago}", style="dim")


def _speed(status: RunStatus) -> Iterator[str]:
    lead = status.leader
    if status.tokens_per_s is not None:
        each = f" ({status.tokens_per_s_per_device:,.0f} a device)" if status.devices > 1 else ""
        yield f"{status.tokens_per_s:,.0f} tokens/s{each}"
    if lead.seconds_per_step is not None:
        yield f"{duration(lead.seconds_per_step)} a step"
    if lead.remaining_s is not None and status.phase is RunPhase.RUNNING:
        yield f"{duration(lead.remaining_s)} left"


def _step(replica: ReplicaStatus) -> str:
    if replica.step is None or not replica.total_steps:
        return f"step {replica.step}"
    fraction = min(1.0, replica.step / replica.total_steps)
    done = round(fraction * BAR_WIDTH)
    return f"step {replica.step}/{replica.total_steps} {'█' * done}{'░' * (BAR_WIDTH - done)} {fraction:.0%}"


class _Row(Struct, frozen=True):
    node: NodeStatus
    ranks: str
    pids: str
    doing: Text
    healthy: bool


def nodes_table(status: RunStatus) -> Table:
    """Nodes with their ranks; if there are too many, unhealthy ones come first and the rest are counted."""
    table = Table(box=None, pad_edge=False, header_style="dim", caption_justify="left", caption_style="")
    for heading in ("node", "host", "state", "rank", "process", "doing"):
        # On a narrow terminal these two shrink, the wider one first; a long host name then ends in an ellipsis.
        shrinks = heading in ("host", "doing")
        table.add_column(heading, no_wrap=not shrinks, overflow="ellipsis" if heading == "host" else "fold")
    rows = list(_rows(status))
    hidden: list[_Row] = []
    if len(rows) > MOST_ROWS:
        rows.sort(key=lambda row: row.healthy)
        rows, hidden = rows[: MOST_ROWS - 1], rows[MOST_ROWS - 1 :]
    named: set[str] = set()
    for row in rows:
        first = row.node.name not in named
        named.add(row.node.name)
        state = Text(row.node.phase.value, style=_NODE_STYLES.get(row.node.phase, "yellow"))
        who = (row.node.name, sanitize(row.node.hostname), state) if first else ("", "", "")
        table.add_row(*who, row.ranks, row.pids, row.doing)
    if hidden:
        well = ", all well" if all(row.healthy for row in hidden) else ""
        table.caption = f"and {len(hidden)} more{well}"
    return table


def _rows(status: RunStatus) -> Iterator[_Row]:
    ranks: dict[int, list[RankStatus]] = {}
    whose: dict[int, str] = {}
    for replica in status.replicas.values():
        for rank in replica.ranks.values():
            ranks.setdefault(rank.node, []).append(rank)
            whose[rank.node] = f" of replica {replica.replica}" if len(status.replicas) > 1 else ""
    one_each = sum(map(len, ranks.values())) <= MOST_ROWS
    for node in status.nodes.values():
        mine = ranks.get(node.node, [])
        if one_each and mine:
            for rank in mine:
                yield _Row(
                    node,
                    f"{rank.rank}{whose[node.node]}",
                    str(rank.pid or ""),
                    _rank_text([rank]),
                    _is_healthy(node, [rank]),
                )
        elif node.standby:
            yield _Row(node, "", "", _standby_text(node), _is_healthy(node, []))
        else:
            numbers = format_numbers([rank.rank for rank in mine])
            yield _Row(node, f"{numbers}{whose.get(node.node, '')}", "", _rank_text(mine), _is_healthy(node, mine))


def _is_healthy(node: NodeStatus, ranks: list[RankStatus]) -> bool:
    return node.phase is NodePhase.JOINED and all(rank.phase in (RankPhase.RUNNING, RankPhase.EXITED) for rank in ranks)


def _standby_text(node: NodeStatus) -> Text:
    """Whether a standby node is ready."""
    return Text("standby, ready", style="green") if node.ready else Text("standby, not ready yet", style="yellow")


def _rank_text(ranks: list[RankStatus]) -> Text:
    """State of these ranks, grouped: `running`, or `0-6 running; 7 exited with code 1 at step 41`."""
    groups: dict[tuple[RankPhase, str], list[int]] = {}
    for rank in ranks:
        groups.setdefault((rank.phase, _phase_text(rank)), []).append(rank.rank)
    text = Text()
    for (phase, words), numbers in groups.items():
        prefix = f"{format_numbers(numbers)} " if len(groups) > 1 else ""
        text.append("; " if text else "")
        text.append(f"{prefix}{words}", style=_RANK_STYLES.get(phase, "red"))
    return text


def _phase_text(rank: RankStatus) -> str:
    if rank.phase in (RankPhase.RUNNING, RankPhase.STOPPED, RankPhase.LOST):
        return rank.phase.value
    at = f" at step {rank.last_step}" if rank.last_step is not None else ""
    return sanitize(f"{rank.detail or rank.phase.value}{at}")
