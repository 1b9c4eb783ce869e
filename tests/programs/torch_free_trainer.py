"""A small distributed program for tests: ranks step together through rank 0, checkpoint, and resume; no torch.

    python torch_free_trainer.py STEPS STEP_S [FAULT]

Ranks meet at MASTER_ADDR:MASTER_PORT, or under torchrun, which listens there itself, at a port of rank 0. A step is
done when every rank has requested it from rank 0, so one lost rank stops all. Rank 0 checkpoints every fifth step into
HOLDFAST_CHECKPOINT_PATH. Each rank appends its steps to `steps-RANK.txt` there, for an independent count. With
TRAINER_METRICS=N each step reports N more metrics. FAULT is `ACTION@RANK@STEP[@ATTEMPT]` with ACTION one of raise,
exit, segv, stop, hang, allocate, daemonise; without ATTEMPT it comes in every attempt. RANK is a number, or `turns`:
another rank in each attempt. Step 0 is before the rank's hello.

One of several replicas steps by itself, with a separate directory, and prints what it receives about the others.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from holdfast.protocol.rank_messages import (
    Hello,
    InjectRankFault,
    RankCheckpointCommitted,
    RankFault,
    RankStep,
    encode,
    rank_request_decoder,
)

STEPS, STEP_S = int(sys.argv[1]), float(sys.argv[2])
FAULT = sys.argv[3].split("@") if len(sys.argv) > 3 else []
RANK = int(os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
WORLD_SIZE = int(os.environ["WORLD_SIZE"])
ATTEMPT = os.environ["HOLDFAST_ATTEMPT"]
REPLICA = os.environ["HOLDFAST_REPLICA"]
FOLDER = Path(os.environ["HOLDFAST_CHECKPOINT_PATH"])
if os.environ["HOLDFAST_REPLICA_COUNT"] != "1":
    FOLDER /= f"replica-{REPLICA}"
MORE = {f"figure{number}": 0.125 for number in range(int(os.environ.get("TRAINER_METRICS", "0")))}
CHECKPOINT = FOLDER / "step.txt"
BEFALLEN: list[RankFault] = []
"""The fault that the agent requests in this rank."""


def rendezvous() -> list[socket.socket]:
    """Sockets to every other rank on rank 0; the one to rank 0 elsewhere."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    taken = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    note = FOLDER / f"port-{ATTEMPT}"
    if RANK == 0:
        server = socket.create_server((host, 0 if taken else port))
        if taken:
            note.with_suffix(".new").write_text(str(server.getsockname()[1]))
            note.with_suffix(".new").rename(note)
        return [server.accept()[0] for _ in range(WORLD_SIZE - 1)]
    while True:
        try:
            return [socket.create_connection((host, int(note.read_text()) if taken else port))]
        except (ConnectionRefusedError, FileNotFoundError):
            time.sleep(0.005)


def meet(peers: list[socket.socket]) -> None:
    """Return when every rank has reached this point; raise when one has gone."""
    if RANK == 0:
        for peer in peers:
            wait_for(peer)
        for peer in peers:
            peer.sendall(b".")
    else:
        peers[0].sendall(b".")
        wait_for(peers[0])


def wait_for(peer: socket.socket) -> None:
    if peer.recv(1) == b"":
        raise ConnectionResetError("Connection closed by peer")


def fault(step: int) -> None:
    if not FAULT:
        return
    chosen = int(ATTEMPT) % WORLD_SIZE if FAULT[1] == "turns" else int(FAULT[1])
    if chosen != RANK or step != int(FAULT[2]) or (len(FAULT) > 3 and FAULT[3] != ATTEMPT):
        return
    match FAULT[0]:
        case "raise":
            raise ValueError(f"bad batch at step {step}")
        case "exit":
            sys.exit(7)
        case "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            while True:
                time.sleep(3600)
        case "allocate":
            memory_hog: list[bytearray] = []
            while True:
                memory_hog.append(bytearray(os.urandom(1) * (16 << 20)))
        case "daemonise":
            subprocess.Popen(["sleep", "3600"], start_new_session=True)


def inject_fault() -> None:
    """Inject a requested fault, as a Session does."""
    match BEFALLEN:
        case [RankFault.RAISE]:
            raise ValueError("a drill: an error of the program's own")
        case [RankFault.HANG]:
            while True:
                time.sleep(3600)
        case [RankFault.COLLECTIVE]:
            mine, _others = socket.socketpair()
            wait_for(mine)
        case _:
            pass


def listen(agent: socket.socket) -> None:
    """Print the agent's messages."""
    for line in agent.makefile():
        print(f"told {line}", end="", flush=True)
        if isinstance(request := rank_request_decoder.decode(line), InjectRankFault):
            BEFALLEN.append(request.fault)


def main() -> None:
    fault(0)
    agent = socket.socket(socket.AF_UNIX)
    agent.connect(os.environ["HOLDFAST_RANK_SOCKET"])
    agent.sendall(encode(Hello(rank=RANK, pid=os.getpid())) + b"\n")
    FOLDER.mkdir(parents=True, exist_ok=True)
    first = int(CHECKPOINT.read_text()) + 1 if CHECKPOINT.exists() else 1
    print(f"rank {RANK} of {WORLD_SIZE} starts at step {first}", flush=True)
    threading.Thread(target=listen, args=(agent,), daemon=True).start()
    peers = rendezvous()
    for peer in peers:
        os.dup(peer.fileno())  # never closed: others see a rank leave when it is gone, not during interpreter shutdown
    started = time.time()
    for step in range(first, STEPS + 1):
        fault(step)
        inject_fault()
        time.sleep(STEP_S)
        meet(peers)
        ended = time.time()
        with (FOLDER / f"steps-{RANK}.txt").open("a") as file:
            file.write(f"{ATTEMPT} {step} {started!r} {ended!r}\n")
        message = RankStep(step=step, started=started, ended=ended, metrics={"loss": 1 / step, "tokens": 64.0} | MORE)
        agent.sendall(encode(message) + b"\n")
        started = ended
        if step % 5:
            continue
        # As with a real checkpoint, no rank resumes from a step that another has not recorded.
        meet(peers)
        if RANK == 0:
            fresh = CHECKPOINT.with_suffix(".new")
            fresh.write_text(str(step))
            fresh.rename(CHECKPOINT)
            agent.sendall(encode(RankCheckpointCommitted(step=step, path=str(CHECKPOINT))) + b"\n")
    print(f"rank {RANK} is done", flush=True)


if __name__ == "__main__":
    main()
