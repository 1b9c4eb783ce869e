"""`python -m holdfast.agent NODE GENERATION --controller URL ...`: started by backends, not by users."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from pathlib import Path

from holdfast.agent.agent import Agent, AgentSettings
from holdfast.errors import ExitCode
from holdfast.host.files import read_line, read_object
from holdfast.host.process_limits import open_more_files, receive_signals, schedule_as_batch
from holdfast.security.api_limits import LIMITS
from holdfast.security.log_rate_limit import LogRateLimit

log = logging.getLogger("holdfast.agent")


def main() -> None:
    """Run the agent that the command line describes until the controller shuts it down."""
    parser = argparse.ArgumentParser(prog="holdfast.agent", description="The agent of one node of a run.")
    parser.add_argument("node", type=int)
    parser.add_argument("generation", type=int)
    parser.add_argument("--controller", required=True, help="WebSocket URL of the controller")
    parser.add_argument("--controller-record", type=Path, help="file with the controller's current address")
    parser.add_argument("--agent-record", type=Path, help="file that names this agent once standard input has ended")
    parser.add_argument("--token-file", required=True, type=Path, help="file that holds the node's token")
    parser.add_argument("--ca", type=Path, help="certificate that the controller presents, for wss URLs")
    parser.add_argument("--folder", required=True, type=Path, help="folder for the node's own files")
    parser.add_argument(
        "--sockets", required=True, type=Path, help="private folder with a short path, for ranks' sockets"
    )
    parser.add_argument(
        "--code", required=True, type=Path, help="folder of uploaded code, shared by the run's nodes on this machine"
    )
    parser.add_argument("--log-replica", type=Path, help="folder for replicas of the event log and the code")
    parser.add_argument("--echo", action="store_true", help="copy what ranks write to standard output")
    parser.add_argument("--address", required=True, help="address at which other nodes reach this one")
    parser.add_argument("--controller-grace-s", required=True, type=float)
    parser.add_argument("--node-grace-s", required=True, type=float)
    parser.add_argument("--stop-grace-s", required=True, type=float)
    given = vars(parser.parse_args())
    agent_record: Path | None = given.pop("agent_record")
    receive_signals()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    for handler in logging.getLogger().handlers:
        handler.addFilter(LogRateLimit(LIMITS.log_lines_a_minute))
    logging.getLogger("websockets").setLevel(logging.WARNING)
    if agent_record is not None and not _is_recorded(agent_record):
        log.warning("the controller died before it recorded this agent; the next one starts another agent in its place")
        return
    settings = AgentSettings(token=read_line(given.pop("token_file")), **given)
    open_more_files()
    schedule_as_batch()
    settings.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Kubernetes and other backends treat exit code 0 as completion and do not replace the node.
    sys.exit(ExitCode.OK if asyncio.run(Agent(settings).run()) else ExitCode.NODES_LOST)


def _is_recorded(record: Path) -> bool:
    """Whether the process that started this agent recorded its pid; nothing would ever stop an unrecorded agent."""
    sys.stdin.buffer.read()
    try:
        return read_object(record).get("pid") == os.getpid()
    except OSError:
        return False


if __name__ == "__main__":
    main()
