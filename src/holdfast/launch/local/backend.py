"""Owns local nodes: one agent process each, found again after a controller's death, and removed without trace.

Each node has a folder in the run's folder with `agent.json` (its process) and `agent.log`, and a private folder for the
ranks' sockets elsewhere (sockets.py).

A file longer than others, because what makes a node, finds it again and removes it must be read side by side.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

from holdfast.events import Outcome
from holdfast.events.orders import RankLaunch
from holdfast.folder import AGENT_NAME, LEFT_NAME, RunFolder, runs_root, write_private
from holdfast.guard.keys import Keys
from holdfast.host.cgroups import Ground, ground
from holdfast.host.files import put, read_line
from holdfast.host.limits import give_back
from holdfast.host.processes import (
    HELPER,
    ProcessId,
    all_pids,
    children,
    descendants,
    end_all,
    identify,
    marked,
    recorded,
    send,
    signal_name,
    strays,
)
from holdfast.job.accepted import Accepted
from holdfast.job.backend import NodeObservation, NodePlace, Sight
from holdfast.job.spec import Job
from holdfast.launch.environment import Attempt
from holdfast.launch.launchers import Plan, launches
from holdfast.launch.local import memory_limit, sockets
from holdfast.launch.local.isolation import Networks
from holdfast.launch.local.share import shares

RENDERED_NODES = 64
"""Most nodes that `render` shows whole: of more, the first ones and the last."""
RENDERED_FIRST = 8

_NODE_FOLDER = re.compile(r"node(?P<node>\d{1,6})\.(?P<generation>\d{1,9})")

END_S = 10.0
"""Seconds to wait for killed processes to be gone; only the kernel can hold one longer."""


class LocalBackend:
    """Makes nodes out of processes of this machine; `url` is where agents find the controller."""

    def __init__(self, *, folder: RunFolder, accepted: Accepted, networks: Networks, url: str) -> None:
        self._folder = folder
        self._accepted = accepted
        self._networks = networks
        self._url = url
        self._seen: asyncio.Queue[NodeObservation] = asyncio.Queue()
        self._machines = accepted.capacity or accepted.job.node_slots
        self._cordoned: set[NodePlace] = set()
        self._waiting: dict[int, NodePlace] = {}
        """Places that are to be made once a machine is free, by node."""
        self._current: dict[int, int] = {}
        self._changing = asyncio.Lock()
        """Held while nodes are made or removed: what ends a slot's earlier generation must not meet its next one."""
        self._over = False
        """Whether the run's nodes were removed for good."""
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        """Agents by pid, kept until they were asked how they ended: subprocess reaps those that are dropped."""

    def generation(self, node: int, address: str) -> int | None:
        """Every generation is told which one it is when it is made."""
        return None

    async def submit(self, places: tuple[NodePlace, ...]) -> None:
        """Start an agent for each place that has none yet, as far as there are machines."""
        async with self._changing:
            await self._submit(places)

    async def _submit(self, places: tuple[NodePlace, ...]) -> None:
        if self._over:
            return
        for place in places:
            if self._read(place) is None:
                self._waiting[place.node] = place
            else:
                self._watch(place)
        for place in await self._fill():
            if place in places:
                self._see(place, Sight.UNAVAILABLE, self._why_none())

    async def _fill(self) -> list[NodePlace]:
        """Make waiting nodes where a machine is free, lowest numbers first; returns those that go on waiting.

        Raises the first error once all were tried: one node that cannot be made keeps no other away.
        """
        held = sum(place not in self._cordoned for place in self._known_places() if self._alive(place))
        free = self._machines - len(self._cordoned) - held
        places = [place for _, place in sorted(self._waiting.items())]
        failed: Exception | None = None
        for place in places[: max(0, free)]:
            try:
                await asyncio.to_thread(self._end_unrecorded, place)
                self._start(place)
            except Exception as error:
                failed = failed or error
                continue
            del self._waiting[place.node]
            self._watch(place)
        if failed is not None:
            raise failed
        return places[max(0, free) :]

    def _why_none(self) -> str:
        out = f", {len(self._cordoned)} of them out of use until `holdfast drill return`" if self._cordoned else ""
        return f"there are {self._machines} machines for nodes here{out}"

    def _alive(self, place: NodePlace) -> bool:
        agent = self._read(place)
        return agent is not None and agent.alive

    def observe(self) -> AsyncIterator[NodeObservation]:
        """Nodes as they are made or cannot be, and agents as they end, while there was no controller included."""
        for place in self._known_places():
            self._watch(place)
        return self._observations()

    async def _observations(self) -> AsyncIterator[NodeObservation]:
        while True:
            yield await self._seen.get()

    async def replace_node(self, place: NodePlace, reason: str) -> None:
        """End whatever is left of the slot's earlier generations, then start this one, if there is a machine for it."""
        async with self._changing:
            for former in self._known_places():
                if former.node == place.node and former.generation < place.generation:
                    await asyncio.to_thread(self._remove, former)
            await self._submit((place,))

    async def cordon(self, place: NodePlace) -> None:
        """One machine fewer: this one pretends to be as many as the profile or the job says."""
        self._cordoned.add(place)

    async def uncordon(self, place: NodePlace) -> None:
        """One machine more, for whoever waits for it."""
        self._cordoned.discard(place)
        async with self._changing:
            await self._fill()

    async def conclude(self, outcome: Outcome, exit_code: int, reason: str) -> None:
        """The run's folder says it all."""

    async def cancel(self) -> None:
        """Remove every node: processes, sockets, namespaces."""
        async with self._changing:
            self._over = True
            self._waiting.clear()
            for place in self._known_places():
                await asyncio.to_thread(self._remove, place)
            await asyncio.to_thread(self._networks.remove)

    def _start(self, place: NodePlace) -> None:
        node_folder = self._folder.node(place.node, place.generation)
        node_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder_of_sockets = sockets.make(node_folder)
        node = self._networks.make_node(place.node)
        argv = [*node.prefix, sys.executable, "-m", "holdfast.agent", str(place.node), str(place.generation)]
        options = {
            "--controller": self._url,
            "--controller-record": str(self._folder.controller),
            "--written-down": str(node_folder / AGENT_NAME),
            "--token-file": str(self._token_file(place, node_folder)),
            "--folder": str(node_folder),
            "--sockets": str(folder_of_sockets),
            "--code": str(self._folder.code),
            "--address": node.address,
            "--controller-grace-s": f"{self._accepted.job.recovery.controller_grace_s:g}",
            "--node-grace-s": f"{self._accepted.job.recovery.node_grace_s:g}",
            "--stop-grace-s": f"{self._accepted.job.recovery.stop_grace_s:g}",
        }
        if self._url.startswith("wss:"):
            options["--ca"] = str(self._folder.ca)
        environ = os.environ | {"HOLDFAST_NODE": _mark(self._folder.run, place)}
        with (node_folder / "agent.log").open("ab") as output:
            process = subprocess.Popen(
                [*argv, *(word for option in options.items() for word in option)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=environ,
                start_new_session=True,
            )
        assert process.stdin is not None
        with process.stdin:  # ends when it is written down, or with this controller; the agent joins nobody before
            give_back(process.pid)
            self._hold_to_its_memory(process.pid, place)
            self._children[process.pid] = process
            # An agent that is dead already is watched like any other: by a pid that cannot be found.
            identity = identify(process.pid) or ProcessId(process.pid, -1)
            put(node_folder / AGENT_NAME, json.dumps({"pid": identity.pid, "started": identity.started}).encode())

    def _hold_to_its_memory(self, agent: int, place: NodePlace) -> None:
        """Before it starts anything; where groups cannot be made, `validate` has said so (possible.py)."""
        limit_bytes, where = self._accepted.job.resources.memory, ground()
        if limit_bytes is not None and isinstance(where, Ground):
            name = f"{self._folder.run}-{place.node}.{place.generation}"
            memory_limit.allow(agent, limit_bytes, self._folder.node(place.node, place.generation), name, where)

    def _token_file(self, place: NodePlace, node_folder: Path) -> Path:
        """The node's own token, written anew: a start that was interrupted may have left half of one."""
        path = node_folder / "token"
        path.unlink(missing_ok=True)
        write_private(path, Keys(read_line(self._folder.token)).of_node(place.node, place.generation))
        return path

    def _end_unrecorded(self, place: NodePlace) -> None:
        """End an agent whose controller died between starting it and writing it down; it has joined nobody."""
        node_folder = self._folder.node(place.node, place.generation)
        if node_folder.exists():
            end_all(lambda: marked(all_pids(), HOLDFAST_NODE=_mark(self._folder.run, place)), within_s=END_S)
            memory_limit.clear(node_folder)
            sockets.remove(node_folder)

    def _read(self, place: NodePlace) -> ProcessId | None:
        """The place's agent, as a controller before us or this one wrote it down."""
        return recorded(self._folder.node(place.node, place.generation) / AGENT_NAME)

    def _known_places(self) -> list[NodePlace]:
        """Places that may have processes: those with a token, which a node is given first and loses last."""
        places: list[NodePlace] = []
        for path in sorted(self._folder.nodes.glob("node*.*/token")):
            named = _NODE_FOLDER.fullmatch(path.parent.name)
            if named is not None and int(named["node"]) < self._accepted.job.node_slots:
                places.append(NodePlace(node=int(named["node"]), generation=int(named["generation"])))
        return places

    def _watch(self, place: NodePlace) -> None:
        """Say so when a place's agent ends; at once when it has ended already."""
        agent = self._read(place)
        if agent is None or self._current.get(place.node, -1) >= place.generation:
            return
        self._current[place.node] = place.generation
        descriptor = _open(agent)
        if descriptor is None:
            self._see(place, Sight.GONE, self._how_it_ended(place, agent.pid))
        else:
            self._see(place, Sight.MADE)
            asyncio.get_running_loop().add_reader(descriptor, self._ended, descriptor, place, agent.pid)

    def _ended(self, descriptor: int, place: NodePlace, pid: int) -> None:
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        self._see(place, Sight.GONE, self._how_it_ended(place, pid))

    def _see(self, place: NodePlace, sight: Sight, reason: str = "") -> None:
        self._seen.put_nowait(NodeObservation(place=place, sight=sight, reason=reason))

    def _how_it_ended(self, place: NodePlace, pid: int) -> str:
        """How a child of ours ended; agents started by an earlier controller are somebody else's children.

        One that left by itself, while there was no controller, has written down why.
        """
        with contextlib.suppress(OSError):
            return read_line(self._folder.node(place.node, place.generation) / LEFT_NAME)
        child = self._children.pop(pid, None)
        # Not `poll()`: of a child that was reaped when its node was removed, it says that it exited with code 0.
        status = _reap(pid) if child is not None else None
        if child is None or status is None:
            return "its agent ended"
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode < 0:
            return f"its agent was ended by {signal_name(-child.returncode)}"
        return f"its agent exited with code {child.returncode}"

    def _remove(self, place: NodePlace) -> None:
        """End a node as a machine ends: every process of it, at once."""
        agent = self._read(place)
        node_folder, mark = self._folder.node(place.node, place.generation), _mark(self._folder.run, place)
        # Its mark too, because after a reboot another process may have its number and, as it were, its start.
        ours = agent is not None and agent.alive and marked((agent.pid,), HOLDFAST_NODE=mark)
        root = agent.pid if agent is not None and ours else None
        if root is not None:
            # Stopped first so that it starts nothing more, and ended last so that its tree stays known.
            send(root, signal.SIGSTOP)

        def tree() -> list[int]:
            below = descendants(root) if root is not None else _orphans(self._folder)
            known = {*below, *marked(all_pids(), HOLDFAST_NODE=mark), *memory_limit.processes(node_folder)}
            return [pid for pid in known if pid != root]

        memory_limit.end(node_folder)
        end_all(tree, within_s=END_S)
        if agent is not None and root is not None:
            end_all(lambda: [root] if agent.alive else [], within_s=END_S)
        sockets.remove(node_folder)
        self._networks.remove_node(place.node)
        memory_limit.clear(node_folder)
        (node_folder / "token").unlink(missing_ok=True)


def _orphans(folder: RunFolder) -> list[int]:
    """What an agent that has died left running with an emptied environment: the run's keeper has adopted it.

    A live agent adopts its own orphans, so none of these is another node's.
    """
    keeper = os.getppid()
    if folder.description().get("keeper") != keeper:
        return []
    orphans = strays(children(keeper), own={os.getsid(keeper)}, known=(HELPER, "HOLDFAST_NODE"))
    return [pid for orphan in orphans for pid in (orphan, *descendants(orphan))]


def _open(agent: ProcessId) -> int | None:
    """A descriptor that tells of the agent's end; None when it has ended."""
    try:
        descriptor = os.pidfd_open(agent.pid)
    except ProcessLookupError:
        return None
    if agent.alive:
        return descriptor
    os.close(descriptor)
    return None


def _reap(child: int) -> int | None:
    """The wait status of a child that has ended; None when somebody else took it in."""
    try:
        pid, status = os.waitpid(child, os.WNOHANG)
    except ChildProcessError:
        return None
    return status if pid else None


def _mark(run: str, place: NodePlace) -> str:
    """HOLDFAST_NODE of everything that belongs to a node."""
    return f"{run}/node{place.node}.{place.generation}"


def render(accepted: Accepted) -> str:
    """Every rank's environment and command for a first attempt, as a shell would read them.

    Words in capitals stand in for what is known only at run time, and for secrets.
    """
    job = accepted.job
    folder = RunFolder(runs_root() / "RUN_ID")
    lines = [*_sizes(job), *_shipped(accepted)]
    of_nodes = shares(job, os.environ)
    for node in _shown(len(of_nodes)):
        if node is None:
            lines.append(
                f"# nodes {RENDERED_FIRST} to {len(of_nodes) - 2} differ from these in their own numbers only\n"
            )
            continue
        share = of_nodes[node]
        plan = Plan.of(accepted, folder, _first_attempt(job, node), dict.fromkeys(job.secrets, "SECRET"))
        place = NodePlace(node=node, generation=0)
        mark = {"HOLDFAST_NODE": _mark(folder.run, place)}
        env, ranks = launches(plan, node, share)
        for launch in ranks:
            code = Path("CODE") if accepted.code else Path()
            lines.extend(_section(place, launch, code, env | launch.env | mark | _from_agent(launch, env)))
    return "\n".join(lines)


def _shown(nodes: int) -> Iterator[int | None]:
    """The nodes to render; None stands for all between the first ones and the last."""
    if nodes <= RENDERED_NODES:
        yield from range(nodes)
    else:
        yield from (*range(RENDERED_FIRST), None, nodes - 1)


def _from_agent(launch: RankLaunch, env: Mapping[str, str]) -> dict[str, str]:
    """What the agent adds (agent/rank.py)."""
    memory = {"HOLDFAST_HANDOVER": "HANDOVER"} if launch.ranks == 1 else {}
    if launch.ranks == 1 and "HOLDFAST_PEER_COPIES" in env:
        memory["HOLDFAST_PEER_MEMORY"] = "PEER_MEMORY"
    return {"HOLDFAST_RANK_SOCKET": "RANK_SOCKET", **memory}


def _first_attempt(job: Job, node: int) -> Attempt:
    """The first attempt of a node's replica, as far as it is known before the run."""
    count = job.recovery.replicas
    each = job.nodes.max // count
    replica = node // each
    nodes = tuple(range(replica * each, (replica + 1) * each))
    head = "HEAD" if count == 1 else f"HEAD_OF_REPLICA_{replica}"
    return Attempt(
        replica=replica,
        replica_count=count,
        attempt=0,
        nodes=nodes,
        master_addr=f"{head}_ADDRESS",
        master_port=f"{head}_PORT",
        doors=tuple(f"NODE{node}_ADDRESS:NODE{node}_PORT" for node in nodes),
        key="ATTEMPT_KEY",
        lighthouse="http://QUORUM_ADDRESS:QUORUM_PORT",
    )


def _sizes(job: Job) -> Iterator[str]:
    """What else than is rendered there may be."""
    if job.nodes.elastic:
        yield f"# on {job.nodes.max} nodes; on fewer, down to {job.nodes.min}, the ranks there are get numbers in a row"
        yield ""


def _shipped(accepted: Accepted) -> Iterator[str]:
    if code := accepted.code:
        files = f"{code.files:,} file{'s' * (code.files != 1)}"
        yield f"# code: {files} in an archive of {code.bytes:,} bytes, unpacked as CODE on every node"
        yield f"# sha256: {code.digest}"
        yield ""


def _section(place: NodePlace, launch: RankLaunch, code: Path, env: dict[str, str]) -> Iterator[str]:
    last = launch.rank + launch.ranks - 1
    whose = f" of replica {env['HOLDFAST_REPLICA']}" if env["HOLDFAST_REPLICA_COUNT"] != "1" else ""
    ranks = f"rank {last}" if launch.ranks == 1 else f"ranks {launch.rank} to {last}"
    yield f"# node{place.node}, {ranks}{whose}"
    yield f"cd {shlex.quote(str(code / launch.cwd))}"
    for path, text in launch.files.items():
        yield f"cat > {shlex.quote(path)} <<END\n{text}END"
    defaults = {name: os.environ.get(name, value) for name, value in launch.defaults.items()}
    for name, value in sorted((defaults | env).items()):
        yield f"{name}={shlex.quote(value)}"
    yield f"$ {shlex.join(launch.argv)}"
    yield ""
