"""Which parallel group a stack waits for, by the names that widely used training code gives its functions."""

from __future__ import annotations

import re
from enum import StrEnum

from msgspec import Struct

from holdfast.diagnose.rank_stack import Stack
from holdfast.protocol.wait_frames import FOR_DEVICE, FOR_REPLICAS


class Wait(StrEnum):
    """For whom a rank waits."""

    NONE = "none"
    """For no other rank: it computes, reads data, or is stuck by itself."""
    TP = "tp"
    CP = "cp"
    EP = "ep"
    DP = "dp"
    PREVIOUS_STAGE = "previous stage"
    NEXT_STAGE = "next stage"
    OTHER_STAGE = "another stage"
    """The pipeline's previous or next stage, whichever it is."""
    ALL = "all"
    """All ranks of the replica, once the gradients are complete."""
    UNKNOWN_GROUP = "unknown group"
    """The ranks of a collective whose group no name shows."""


class _Row(Struct, frozen=True):
    wait: Wait
    frames: re.Pattern[str]


def _row(wait: Wait, *frames: str) -> _Row:
    return _Row(wait, re.compile("|".join(f"(?:{each})" for each in frames)))


# Each pattern matches a frame as rank_stack.py writes it; a file without its folder is unlikely to name anything else.
_ROWS = (
    # Megatron-LM core/pipeline_parallel/p2p_communication.py
    _row(Wait.NEXT_STAGE, r"^(?:send_forward|recv_backward|send_forward_recv_backward) \(p2p_communication\.py"),
    _row(Wait.PREVIOUS_STAGE, r"^(?:recv_forward|send_backward|send_backward_recv_forward) \(p2p_communication\.py"),
    # torch/distributed/pipelining/schedules.py; deepspeed/runtime/pipe/p2p.py
    _row(Wait.OTHER_STAGE, r"^_?(?:communicate|wait_batch_p2p|batch_p2p) \(", r"^(?:send|recv|wait) \(p2p\.py"),
    # Megatron-LM core/transformer/moe and core/tensor_parallel; torchtitan expert_parallel.py; deepspeed/moe
    _row(Wait.EP, r"\((?:token_dispatcher|expert_parallel|fused_a2a|sharded_moe)\.py"),
    _row(Wait.EP, r"^_?all_to_all\w* \(mappings\.py"),
    # TransformerEngine context_parallel.py; torch/distributed/tensor/experimental/_attention.py
    _row(Wait.CP, r"\((?:context_parallel|ring_attention|_context_parallel|_attention)\.py"),
    # Megatron-LM core/tensor_parallel
    _row(Wait.TP, r"^_?(?:reduce|gather|split|reduce_scatter)\w* \(mappings\.py", r"\(cross_entropy\.py"),
    # Megatron-LM core/distributed; torch/distributed/fsdp; deepspeed/runtime/zero
    _row(Wait.DP, r"\((?:param_and_grad_buffer|finalize_model_grads|_fsdp_\w+|_unshard_utils|_runtime_utils)\.py"),
    _row(Wait.DP, r"\((?:stage_1_and_2|stage3|distrib_optimizer)\.py"),
    # Megatron-LM core/optimizer/clip_grads.py; torch/nn/utils/clip_grad.py
    _row(Wait.ALL, r"\((?:clip_grads|clip_grad)\.py"),
)
_DIRECTIONS = (Wait.NEXT_STAGE, Wait.PREVIOUS_STAGE)
DIRECTION_FRAMES = 3
"""Frames around a message between stages that may show its direction."""
# A call of torch.distributed or torch.cuda, which shows a wait and not for whom.
_CALL = re.compile(
    r"^_?(?:all_reduce|all_gather|reduce_scatter|broadcast|barrier|monitored_barrier|all_to_all|reduce|gather|scatter"
    r"|i?send|i?recv|batch_isend_irecv|wait)\w* \((?:distributed_c10d|_functional_collectives\w*|functional)\.py"
    r"|^_engine_run_backward \(|^synchronize \((?:__init__|streams)\.py"
)
_POINT_TO_POINT = re.compile(r"^(?:i?send|i?recv|batch_isend_irecv)\w* \(distributed_c10d\.py")


def waits_for(stack: Stack) -> Wait:
    """For whom the rank with this stack waits; the innermost frame that shows it decides."""
    if any(FOR_REPLICAS in frame for frame in stack):
        return Wait.ALL
    if any(FOR_DEVICE in frame for frame in stack):
        return Wait.UNKNOWN_GROUP
    if not stack or not (_CALL.search(stack[0]) or _named(stack[0])):
        return Wait.NONE
    for number, frame in enumerate(stack):
        wait = _named(frame)
        if wait is Wait.OTHER_STAGE:
            around = map(_named, stack[number : number + DIRECTION_FRAMES])
            return next((named for named in around if named is not None and named in _DIRECTIONS), wait)
        if wait is not None:
            return wait
    return Wait.OTHER_STAGE if _POINT_TO_POINT.search(stack[0]) else Wait.UNKNOWN_GROUP


def _named(frame: str) -> Wait | None:
    """For whom this frame waits, by its name."""
    return next((row.wait for row in _ROWS if row.frames.search(frame)), None)
