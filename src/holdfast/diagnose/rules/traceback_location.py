"""Rules for the location of a traceback, for logs cut before the error line. Context, never the cause."""

from __future__ import annotations

from holdfast.diagnose.failure_classes import FailureClass
from holdfast.diagnose.rules.rule import Role, Rule

RULES: tuple[Rule, ...] = (
    Rule(
        code="traceback-in-rendezvous",
        matches={
            r", in (?:_create_c10d_store|_env_rendezvous_handler|_tcp_rendezvous_handler|_rendezvous_helper|next_rendezvous|_create_tcp_store)$": '  File "/opt/venv/lib/python3.12/site-packages/torch/distributed/rendezvous.py", line 200, in _create_c10d_store',
            r"store = TCPStore\(": "    store = TCPStore(",
        },
        role=Role.CONTEXT,
        classes=(
            FailureClass.RENDEZVOUS,
            FailureClass.FIREWALL,
            FailureClass.RANK_COUNT,
            FailureClass.WRONG_INTERFACE,
            FailureClass.PROGRAM_ERROR,
        ),
        message="a rank was in rendezvous; the line with its error is missing",
        needs=("first-traceback", "resolves", "reachable"),
        source="torch rendezvous.py",
    ),
    Rule(
        code="traceback-in-gpu-setup",
        matches={
            r"torch\._C\._cuda_(?:init|setDevice|getDeviceCount)\(": "    torch._C._cuda_setDevice(device)",
            r", in _lazy_init$": '  File "/opt/venv/lib/python3.12/site-packages/torch/cuda/__init__.py", line 319, in _lazy_init',
        },
        role=Role.CONTEXT,
        classes=(FailureClass.DRIVER, FailureClass.RANK_COUNT, FailureClass.GPU_XID, FailureClass.VERSION_MISMATCH),
        message="a rank was initialising its GPU; the line with its error is missing",
        needs=("first-traceback", "gpus-seen", "xid"),
        source="torch cuda",
    ),
    Rule(
        code="traceback-in-dataloader",
        matches={
            r", in (?:_try_get_data|_worker_loop|reduce_storage|rebuild_storage_\w{1,20})$": '  File "/opt/venv/lib/python3.12/site-packages/torch/utils/data/dataloader.py", line 1251, in _try_get_data',
            r"\._(?:new_shared|share_f)\w{1,40}\(": "    storage = cls._new_shared_filename_cpu(manager, handle, size)",
        },
        role=Role.CONTEXT,
        classes=(
            FailureClass.SHM_TOO_SMALL,
            FailureClass.OOM_HOST,
            FailureClass.MEMLOCK,
            FailureClass.NAN_DATA,
            FailureClass.PROGRAM_ERROR,
        ),
        message="a rank was receiving data from its data-loading processes; the line with its error is missing",
        needs=("first-traceback", "shm", "kernel-log"),
        source="torch utils/data, multiprocessing",
    ),
    Rule(
        code="traceback-in-checkpoint",
        matches={
            r"torch/serialization\.py\", line": '  File "/opt/venv/lib/python3.12/site-packages/torch/serialization.py", line 441, in save',
            r"torch/distributed/checkpoint/\w{1,40}\.py\", line": '  File "/opt/venv/lib/python3.11/site-packages/torch/distributed/checkpoint/state_dict_loader.py", line 240, in load',
            r", in (?:save|load)_checkpoint$": '  File "/job/checkpointing.py", line 88, in load_checkpoint',
        },
        role=Role.CONTEXT,
        classes=(
            FailureClass.STORAGE,
            FailureClass.OOM_HOST,
            FailureClass.VERSION_MISMATCH,
            FailureClass.PROGRAM_ERROR,
        ),
        message="a rank was saving or loading state; the line with its error is missing",
        needs=("first-traceback", "disk-usage"),
        source="torch serialization.py, distributed/checkpoint",
    ),
    Rule(
        code="traceback-in-collective",
        matches={
            r", in (?:barrier|all_reduce|all_gather\w{0,20}|broadcast\w{0,20}|reduce_scatter\w{0,20}|wait_for_everyone)$": '  File "/opt/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", line 3683, in barrier',
            r"_verify_param\w{1,30}_across_processes": "    return dist._verify_params_across_processes(process_group, tensors, logger)",
            r"default_pg\.(?:barrier|allreduce|broadcast|allgather)\(": "        work = default_pg.broadcast([tensor], opts)work = default_pg.broadcast([tensor], opts)",
        },
        role=Role.CONTEXT,
        classes=(
            FailureClass.COLLECTIVE_MISMATCH,
            FailureClass.STRAGGLER,
            FailureClass.WRONG_INTERFACE,
            FailureClass.NETWORK_LOSS,
            FailureClass.SHM_TOO_SMALL,
            FailureClass.HANG_UNKNOWN,
            FailureClass.PROGRAM_ERROR,
        ),
        message="a rank was in a collective; the line with its error is missing",
        needs=("first-traceback", "last-collectives", "nccl-warn"),
        source="torch distributed_c10d.py",
    ),
)
