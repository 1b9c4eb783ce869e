"""Dumps as py-spy writes them, for ranks of a program that is built like Megatron-LM; for bench/stack_groups.py."""

from __future__ import annotations

SITE = "/opt/venv/lib/python3.12/site-packages"
C10D = f"{SITE}/torch/distributed/distributed_c10d.py"
LOGGER = f"    wrapper ({SITE}/torch/distributed/c10d_logger.py:83)"
CORE = f"{SITE}/megatron/core"
SCHEDULES = f"{CORE}/pipeline_parallel/schedules.py"
OUTER = f"""    forward_backward_pipelining_without_interleaving ({SCHEDULES}:2011)
    train_step (/workspace/pretrain.py:1305)
    train (/workspace/pretrain.py:2101)
    <module> (/workspace/pretrain.py:3004)"""
FORWARD = f"    forward ({CORE}/transformer/transformer_layer.py:512)\n    forward_step ({SCHEDULES}:402)"
BACKWARD = f"""    _engine_run_backward ({SITE}/torch/autograd/graph.py:829)
    backward ({SITE}/torch/autograd/__init__.py:347)
    backward_step ({SCHEDULES}:463)"""
HELPERS = """Thread 4301 (idle): "Thread-1 (_pin_memory_loop)"
    select (selectors.py:468)
    wait (multiprocessing/connection.py:1136)
    _poll (multiprocessing/connection.py:440)
Thread 4302 (idle): "Thread-2"
    wait (threading.py:359)
    run (/opt/venv/lib/python3.12/site-packages/tqdm/_monitor.py:60)
"""
INSIDE = (
    "",
    "    _wait (/opt/venv/lib/python3.12/site-packages/torch/_ops.py:1158)\n",
    "    _check (c10d.so)\n",
    "    pthread_cond_wait (libc.so.6)\n",
)
"""Innermost frames that differ between ranks in the same call: Python's own, or native ones."""
CALLS = {
    "tp": ("all_reduce", f"    _reduce ({CORE}/tensor_parallel/mappings.py:37)"),
    "cp": (
        "all_gather",
        f"    attn_forward_func_with_cp ({SITE}/transformer_engine/pytorch/attention/context_parallel.py:3410)",
    ),
    "ep": ("all_to_all_single", f"    token_dispatch ({CORE}/transformer/moe/token_dispatcher.py:610)"),
    "dp": ("reduce_scatter_tensor", f"    finish_grad_sync ({CORE}/distributed/param_and_grad_buffer.py:301)"),
    "all": ("all_reduce", f"    get_grad_norm_fp32 ({CORE}/optimizer/clip_grads.py:120)"),
}
UNNAMED = {
    "tp": "    sum_parts (/workspace/parts.py:40)",
    "cp": "    join_sequence (/workspace/sequence.py:55)",
    "ep": "    route (/workspace/experts.py:71)",
    "dp": "    average (/workspace/gradients.py:19)",
    "all": "    clip (/workspace/pretrain.py:1190)",
}
ELSEWHERE = (
    "    emit (logging/__init__.py:1160)\n    log_step (/workspace/pretrain.py:980)",
    "    collect (/workspace/memory.py:31)\n    train (/workspace/pretrain.py:2077)",
    "    read (/workspace/data.py:77)\n    next_batch (/workspace/data.py:40)\n    train (/workspace/pretrain.py:2090)",
)


def dump(kind: str, backward: bool, steady: bool, variant: int, *, named: bool) -> str:
    """The dump of a rank in a call of this kind; in no call if it is empty. `variant` is what differs between ranks."""
    if variant >= 100:
        return _whole(ELSEWHERE[variant - 100])
    within = BACKWARD if backward else FORWARD
    if not kind:
        return _whole(f"    forward ({CORE}/transformer/mlp.py:140)\n{FORWARD}\n{OUTER}")
    if kind.startswith("recv_"):
        function = (
            {"recv_forward": "send_backward_recv_forward", "recv_backward": "send_forward_recv_backward"}[kind]
            if steady
            else kind
        )
        place = f"{CORE}/pipeline_parallel/p2p_communication.py" if named else "/workspace/stages.py"
        call = f"    recv ({C10D}:2501)\n" if not named else ""
        frames = f"{call}    _communicate ({place}:402)\n    {function} ({place}:510)\n{OUTER}"
        return _whole(frames)
    function, caller = CALLS[kind]
    call = f"{INSIDE[variant]}    {function} ({C10D}:2841)\n{LOGGER}\n{caller if named else UNNAMED[kind]}"
    if kind in ("dp", "all"):
        return _whole(f"{call}\n    train_step (/workspace/pretrain.py:1340)\n    train (/workspace/pretrain.py:2101)")
    if not backward:
        return _whole(f"{call}\n{within}\n{OUTER}")
    # Autograd runs the backward functions in another thread.
    inside = f'Thread 4400 (idle): "Dummy-4"\n{call}\n    backward ({CORE}/tensor_parallel/layers.py:480)\n'
    return _whole(f"{within}\n{OUTER}") + inside


def _whole(frames: str) -> str:
    return (
        "Process 4242: python pretrain.py\nPython v3.12.4 (/opt/venv/bin/python3.12)\n\n"
        f'Thread 4242 (idle): "MainThread"\n{frames}\n{HELPERS}'
    )
