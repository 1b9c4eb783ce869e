"""Explains NCCL's result codes and the completion statuses of InfiniBand verbs."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from holdfast.diagnose.knowledge.explanation import Explanation
from holdfast.events import DeviceFault

RESULTS_SOURCE = "NVIDIA, NCCL API, types: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/types.html"
VERBS_SOURCE = "rdma-core, ibv_poll_cq(3): https://man7.org/linux/man-pages/man3/ibv_poll_cq.3.html"

_WARN = "Set NCCL_DEBUG=WARN: the first `NCCL WARN` line of that rank names the cause."


class ResultCode(Struct, frozen=True):
    """One value of ncclResult_t, or of ibv_wc_status."""

    number: int
    name: str
    cause: str
    confirm: str
    remedy: str
    text: str = ""
    """What ncclGetErrorString returns for it, without its advice; only of results with a `fault`."""
    fault: DeviceFault | None = None
    """What it says of a device when a rank has failed."""


RESULTS: tuple[ResultCode, ...] = (
    ResultCode(
        1,
        "ncclUnhandledCudaError",
        "A CUDA call inside NCCL failed. Often it reports an earlier error of the program, or the GPU is out of "
        "memory.",
        f"{_WARN} It names the CUDA error: `holdfast explain CUDA_ERROR_…`.",
        "Fix the CUDA error; with CUDA_LAUNCH_BLOCKING=1 it is reported where it happens.",
        "unhandled cuda error",
        DeviceFault.UNCLEAR,
    ),
    ResultCode(
        2,
        "ncclSystemError",
        "A call to the operating system or a network library failed: a full /dev/shm, a locked-memory limit, a socket.",
        _WARN,
        "Fix what that line names: a larger /dev/shm, `ulimit -l unlimited`, the right NCCL_SOCKET_IFNAME.",
        "unhandled system error",
        DeviceFault.NCCL_SYSTEM,
    ),
    ResultCode(
        3,
        "ncclInternalError",
        "An internal check of NCCL failed: a bug, overwritten memory, or incompatible libraries.",
        f"{_WARN} Compare `NCCL version` on all ranks.",
        "Use the same NCCL on all nodes; then a newer one; then report it with the log of NCCL_DEBUG=INFO.",
    ),
    ResultCode(
        4,
        "ncclInvalidArgument",
        "A call has an invalid argument: a wrong pointer, rank or count.",
        _WARN,
        "Fix the call; the usual reason is that ranks pass different sizes or types.",
    ),
    ResultCode(
        5,
        "ncclInvalidUsage",
        "The program used NCCL in an unsupported way: two ranks on one GPU, or calls in another order on some rank.",
        f"{_WARN} `Duplicate GPU detected` means that ranks share a GPU.",
        "One GPU per rank: LOCAL_RANK in torch.cuda.set_device, and as many ranks as GPUs.",
    ),
    ResultCode(
        6,
        "ncclRemoteError",
        "A peer ended or closed the connection. This rank only noticed: the cause is in another rank's log.",
        "Find the rank whose log ends first, or has an error that mentions no peer: `holdfast diagnose LOGS`.",
        "Fix that rank's error; this rank has no fault.",
        "remote process exited or there was a network error",
        DeviceFault.NCCL_REMOTE,
    ),
    ResultCode(
        7,
        "ncclInProgress",
        "Not an error: a call of a non-blocking communicator is still in progress. As the last line of a log: "
        "ranks waited for others.",
        "Find the rank that did not take part: a stack of each rank (`py-spy dump`), or flight recorder dumps.",
        "Fix the rank that did not take part.",
    ),
    ResultCode(
        8,
        "ncclTimeout",
        "A call did not finish within NCCL's timeout.",
        "Find the rank that did not take part: a stack of each rank (`py-spy dump`), or flight recorder dumps.",
        "Fix the rank that did not take part; raise the timeout only if that rank was slow for a good reason.",
    ),
)

_FABRIC = "`ibstat`, `show_gids`, `ethtool -S` (discards, pause frames) on both ends; `ib_write_bw` between them."
_MEMORY = "`ulimit -l` in the container; `lsmod | grep peermem`; `NCCL INFO NET/IB : GPU Direct RDMA` in the log."

STATUSES: tuple[ResultCode, ...] = (
    ResultCode(
        1,
        "IBV_WC_LOC_LEN_ERR",
        "A message was longer than its receive buffer; between two nodes: unequal MTU.",
        "`ibv_devinfo | grep mtu` on both ends.",
        "Set the same active MTU on every RDMA interface.",
    ),
    ResultCode(
        2,
        "IBV_WC_LOC_QP_OP_ERR",
        "The adapter rejected its own request: it is incompatible with its driver or firmware.",
        "`ibv_devinfo | grep fw_ver` on all nodes; `dmesg | grep mlx5`.",
        "Install the same driver and firmware on all nodes.",
    ),
    ResultCode(
        4,
        "IBV_WC_LOC_PROT_ERR",
        "The adapter was denied access to registered memory: GPU memory over PCIe with ACS or an IOMMU on, or "
        "peer memory that was freed.",
        "`lspci -vvv | grep ACSCtl` (SrcValid+ is on); `dmesg | grep -i -e iommu -e dmar`.",
        "Switch ACS off on the bridges between GPU and adapter (and the IOMMU, or set it to passthrough); "
        "NCCL_NET_GDR_LEVEL=LOC proves it at the price of speed.",
    ),
    ResultCode(
        5,
        "IBV_WC_WR_FLUSH_ERR",
        "The connection failed earlier and its queued requests are flushed. Never the cause.",
        "Find the first completion of that connection with another status.",
        "Fix the first one.",
    ),
    ResultCode(
        9,
        "IBV_WC_REM_INV_REQ_ERR",
        "The other end rejected a request as invalid: unequal versions or settings.",
        "Compare `NCCL version` and the NCCL_ variables on both ends.",
        "Use the same NCCL, plugins and settings on all nodes.",
    ),
    ResultCode(
        10,
        "IBV_WC_REM_ACCESS_ERR",
        "The other end denied access to its memory: registered wrongly, freed, or ACS or an IOMMU there.",
        _MEMORY,
        "Check the peer's log first; then ACS and IOMMU there.",
    ),
    ResultCode(
        11,
        "IBV_WC_REM_OP_ERR",
        "The other end could not perform the request because of a fault on its side.",
        "The peer's log and its `dmesg | grep mlx5`.",
        "Check the peer's adapter.",
    ),
    ResultCode(
        12,
        "IBV_WC_RETRY_EXC_ERR",
        "The other end did not answer any of the retries: it died, a link or switch lost packets, or the route "
        "(GID, VLAN, MTU, partition) is wrong.",
        f"First check whether the peer's rank had ended before. Then {_FABRIC}",
        "A dead peer: read its log. A lossy fabric: PFC and ECN on RoCE, cables and ports. A wrong route: "
        "NCCL_IB_GID_INDEX, NCCL_IB_HCA. NCCL_IB_TIMEOUT=22 only helps over short outages.",
    ),
    ResultCode(
        13,
        "IBV_WC_RNR_RETRY_EXC_ERR",
        "The other end was alive but never ready to receive: its process hung or was stopped.",
        "A stack of the peer (`py-spy dump`), and its load.",
        "Fix what blocks the peer.",
    ),
)


def rows() -> Iterator[Explanation]:
    """NCCL's results by name; verbs statuses as `IBV_WC_…` and by number."""
    for one in RESULTS:
        yield Explanation(
            code=one.name,
            cause=one.cause,
            confirm=one.confirm,
            remedy=one.remedy,
            source=RESULTS_SOURCE,
            names=(f"NCCL-{one.number}",),
        )
    for one in STATUSES:
        yield Explanation(
            code=one.name,
            title=f"completion with status {one.number}",
            cause=one.cause,
            confirm=one.confirm,
            remedy=one.remedy,
            source=VERBS_SOURCE,
            names=(f"IBV-{one.number}", f"status {one.number}", f"error {one.number}", str(one.number)),
        )
