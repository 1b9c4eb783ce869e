"""Owns what NCCL's results and the completion statuses of InfiniBand verbs mean."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.diagnose.knowledge.explanation import Explanation

RESULTS_SOURCE = "NVIDIA, NCCL API, types: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/types.html"
VERBS_SOURCE = "rdma-core, ibv_poll_cq(3): https://man7.org/linux/man-pages/man3/ibv_poll_cq.3.html"

_WARN = "Set NCCL_DEBUG=WARN: the first `NCCL WARN` line of that rank says what it is."


@dataclass(frozen=True)
class ResultCode:
    """One value of ncclResult_t, or of ibv_wc_status."""

    number: int
    name: str
    cause: str
    confirm: str
    remedy: str


RESULTS: tuple[ResultCode, ...] = (
    ResultCode(
        1,
        "ncclUnhandledCudaError",
        "A CUDA call inside NCCL failed. Often the program's own error that comes to light there, or no GPU memory.",
        f"{_WARN} It names the CUDA error: `holdfast explain CUDA_ERROR_…`.",
        "Act on the CUDA error; with CUDA_LAUNCH_BLOCKING=1 it is reported where it happens.",
    ),
    ResultCode(
        2,
        "ncclSystemError",
        "A call to the operating system or a network library failed: a full /dev/shm, a locked-memory limit, a socket.",
        _WARN,
        "Act on that line: a larger /dev/shm, `ulimit -l unlimited`, the right NCCL_SOCKET_IFNAME.",
    ),
    ResultCode(
        3,
        "ncclInternalError",
        "NCCL met what it thinks cannot be: a bug, memory that was overwritten, or libraries that don't go together.",
        f"{_WARN} Compare `NCCL version` on all ranks.",
        "The same NCCL on all nodes; then a newer one; then report it with the log of NCCL_DEBUG=INFO.",
    ),
    ResultCode(
        4,
        "ncclInvalidArgument",
        "A call was given what makes no sense: a wrong pointer, rank or count.",
        _WARN,
        "Mend the call; ranks that pass different sizes or types are the usual reason.",
    ),
    ResultCode(
        5,
        "ncclInvalidUsage",
        "NCCL was used in a way it does not allow: two ranks on one GPU, or calls in another order on some rank.",
        f"{_WARN} `Duplicate GPU detected` means that ranks share a GPU.",
        "One GPU for each rank: LOCAL_RANK in torch.cuda.set_device, and as many ranks as GPUs.",
    ),
    ResultCode(
        6,
        "ncclRemoteError",
        "A peer ended or hung up. This rank only noticed: the cause is in another rank's log.",
        "Find the rank whose log ends first, or has an error that speaks of no peer: `holdfast diagnose LOGS`.",
        "Act on what that rank says; nothing is wrong here.",
    ),
    ResultCode(
        7,
        "ncclInProgress",
        "No error: a call of a non-blocking communicator is not finished. As last words: ranks waited for others.",
        "Look which rank did not take part: a stack of each rank (`py-spy dump`), or flight recorder dumps.",
        "Look after the missing rank.",
    ),
    ResultCode(
        8,
        "ncclTimeout",
        "A call did not finish within the time that NCCL was given.",
        "Look which rank did not take part: a stack of each rank (`py-spy dump`), or flight recorder dumps.",
        "Look after the missing rank; raise the time only if that rank was slow for a good reason.",
    ),
)

_FABRIC = "`ibstat`, `show_gids`, `ethtool -S` (discards, pause frames) on both ends; `ib_write_bw` between them."
_MEMORY = "`ulimit -l` in the container; `lsmod | grep peermem`; `NCCL INFO NET/IB : GPU Direct RDMA` in the log."

STATUSES: tuple[ResultCode, ...] = (
    ResultCode(
        1,
        "IBV_WC_LOC_LEN_ERR",
        "A message was longer than what its receiver had room for; between two nodes: unequal MTU.",
        "`ibv_devinfo | grep mtu` on both ends.",
        "The same active MTU on every RDMA interface.",
    ),
    ResultCode(
        2,
        "IBV_WC_LOC_QP_OP_ERR",
        "The adapter refused its own request: it and its driver or firmware don't go together.",
        "`ibv_devinfo | grep fw_ver` on all nodes; `dmesg | grep mlx5`.",
        "The same driver and firmware on all nodes.",
    ),
    ResultCode(
        4,
        "IBV_WC_LOC_PROT_ERR",
        "The adapter was not allowed to touch the memory it was given: GPU memory over PCIe with ACS or an IOMMU on, "
        "or peer memory that went away.",
        "`lspci -vvv | grep ACSCtl` (SrcValid+ is on); `dmesg | grep -i -e iommu -e dmar`.",
        "Switch ACS off on the bridges between GPU and adapter (and the IOMMU, or set it to passthrough); "
        "NCCL_NET_GDR_LEVEL=LOC proves it at the price of speed.",
    ),
    ResultCode(
        5,
        "IBV_WC_WR_FLUSH_ERR",
        "The connection had failed before and what was queued is thrown away. Never the cause.",
        "Look for the first completion of that connection with another status.",
        "Act on the first one.",
    ),
    ResultCode(
        9,
        "IBV_WC_REM_INV_REQ_ERR",
        "The other end refused a request as invalid: unequal versions or settings.",
        "Compare `NCCL version` and the NCCL_ variables on both ends.",
        "The same NCCL, plugins and settings on all nodes.",
    ),
    ResultCode(
        10,
        "IBV_WC_REM_ACCESS_ERR",
        "The other end did not allow its memory to be reached: registered wrongly, gone, or ACS or an IOMMU there.",
        _MEMORY,
        "Look at the peer's log first; then ACS and IOMMU there.",
    ),
    ResultCode(
        11,
        "IBV_WC_REM_OP_ERR",
        "The other end could not do what was asked, by a fault of its own.",
        "The peer's log and its `dmesg | grep mlx5`.",
        "Look after the peer's adapter.",
    ),
    ResultCode(
        12,
        "IBV_WC_RETRY_EXC_ERR",
        "The other end did not answer however often it was tried: it died, a link or switch lost packets, or the route "
        "(GID, VLAN, MTU, partition) is wrong.",
        f"First whether the peer's rank had ended before. Then {_FABRIC}",
        "A dead peer: its log. A lossy fabric: PFC and ECN on RoCE, cables and ports. A wrong route: "
        "NCCL_IB_GID_INDEX, NCCL_IB_HCA. NCCL_IB_TIMEOUT=22 only helps over short outages.",
    ),
    ResultCode(
        13,
        "IBV_WC_RNR_RETRY_EXC_ERR",
        "The other end was there, and never ready to receive: its process hung or was stopped.",
        "A stack of the peer (`py-spy dump`), and its load.",
        "Look after the peer.",
    ),
)


def rows() -> Iterator[Explanation]:
    """NCCL's results by name, verbs' statuses as `IBV_WC_…` and by number."""
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
