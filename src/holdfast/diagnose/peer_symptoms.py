"""Recognises, in the last error line of a rank, that its peer failed: each pattern with a line that it matches."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from holdfast.diagnose.precedence import PeerSymptom

OF_A_PEER: Mapping[str, str] = {
    r"closed by (?:remote )?peer": "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:29318",
    r"remote process exit": "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    r"communicator was aborted": "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1.",
    r"DistNetworkError": "torch.distributed.DistNetworkError: recvValueWithTimeout failed on SocketImpl(fd=3, ...): Connection reset by peer",
    r"Socket recv failed": "torch.distributed.DistBackendError: NCCL error in: ../ProcessGroupNCCL.cpp:1333, unhandled system error: Socket recv failed",
    r"Timed out waiting \d+ms for": "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv",
    r"Timed out after \d+ seconds waiting for clients": "torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. 1/2 clients joined.",
    r"(?:torch\.distributed|gloo|nccl|c10d|TCPStore|SocketImpl|XlaRuntimeError|JaxRuntimeError)\b.*"
    r"(?:reset by peer|broken pipe|connection refused|timed out)": "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:5] Read error: Connection reset by peer",
    # torch's heartbeat monitor; older releases write the second
    r"attempting to dump debug info, due to": "[F513 12:46:14.495035780 ProcessGroupNCCL.cpp:1614] [PG ID 0 PG GUID 0(default_pg) Rank 1] [PG ID 0 PG GUID 0(default_pg) Rank 1] Terminating the process after attempting to dump debug info, due to ProcessGroupNCCL watchdog hang.",
    r"watchdog got stuck for": "[F ProcessGroupNCCL.cpp:1169] [PG 5 Rank 0] [PG 5 Rank 0] ProcessGroupNCCL's watchdog got stuck for 600 seconds without making progress in monitoring enqueued collectives. This typically indicates a NCCL/CUDA API hang blocking the watchdog",
    r"JAX distributed service detected fatal errors": "F0929 17:42:48.594200 1044529 client.h:77] Terminating process because the JAX distributed service detected fatal errors. This most likely indicates that another task died; see the other task logs for more details.",
    # The store of torch before 2.1; Python's own error would be BrokenPipeError: [Errno 32] Broken pipe
    r"(?:RuntimeError: |what\(\): +)(?:Connection reset by peer|Broken pipe|Connection refused|Connection timed out)": "RuntimeError: Broken pipe",
}
"""Error lines of a rank whose peer is gone: never the cause while another failure is known."""

OF_A_NETWORK: Mapping[str, str] = {
    r"reset by peer": "ConnectionResetError: [Errno 104] Connection reset by peer",
    r"broken pipe": "BrokenPipeError: [Errno 32] Broken pipe",
    r"connection refused": "ConnectionRefusedError: [Errno 111] Connection refused",
    r"timed out": "requests.exceptions.ReadTimeout: HTTPSConnectionPool(host='data', port=443): Read timed out. (read timeout=10)",
}
"""Error lines that may mean a lost peer, or a lost data server: the cause if no better one is known."""

GAVE_UP: Mapping[str, str] = {
    r"Timed out waiting \d+ms for (?:recv|send)": "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv",
    r"collective operation timeout": "torch.distributed.DistBackendError: [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=19, ...",
    r"due to ProcessGroupNCCL watchdog hang": "[F513 12:46:14.495035780 ProcessGroupNCCL.cpp:1614] [PG ID 0 PG GUID 0(default_pg) Rank 1] [PG ID 0 PG GUID 0(default_pg) Rank 1] Terminating the process after attempting to dump debug info, due to ProcessGroupNCCL watchdog hang.",
    r"due to collective timeout": "[F725 02:47:41.268394894 ProcessGroupNCCL.cpp:1653] [PG ID 0 PG GUID 0(default_pg) Rank 0] [PG ID 0 PG GUID 0(default_pg) Rank 0] Terminating the process after attempting to dump debug info, due to collective timeout or exception.",
    r"wait timeout after \d+ms": "torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//cuda//0",
    r"Timed out after \d+ seconds waiting for clients": "torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. 1/2 clients joined.",
}
"""Error lines of a rank whose wait for its peers timed out."""


def _any_of(patterns: Iterable[str], flags: int = 0) -> re.Pattern[str]:
    return re.compile("|".join(patterns), flags)


_OF_A_PEER, _OF_A_NETWORK = (_any_of(each, re.IGNORECASE) for each in (OF_A_PEER, OF_A_NETWORK))
_GAVE_UP = _any_of(GAVE_UP)


def peer_symptom(error: str) -> PeerSymptom:
    """How likely this error line is a symptom of a failure elsewhere."""
    if _OF_A_PEER.search(error):
        return PeerSymptom.PEER
    return PeerSymptom.NETWORK if _OF_A_NETWORK.search(error) else PeerSymptom.NONE


def gave_up_waiting(error: str) -> bool:
    """Whether the wait of this line's rank for its peers timed out."""
    return _GAVE_UP.search(error) is not None
