"""Rules for memory and limits: GPU memory, /dev/shm, locked memory, open files."""

from __future__ import annotations

from holdfast.diagnose.classes import Class
from holdfast.diagnose.rules.row import Rule, Sureness

RULES: tuple[Rule, ...] = (
    Rule(
        code="shm-segment",
        lines=(
            "gpu-7:811:990 [3] include/shm.h:28 NCCL WARN Call to posix_fallocate failed : No space left on device",
            "n1:52:77 [0] misc/shmutils.cc:72 NCCL WARN Call to fallocate failed : No space left on device",
            "n1:52:77 [0] misc/shmutils.cc:88 NCCL WARN Error: failed to extend /dev/shm/nccl-a1B2c3 to 33030532 "
            "bytes, error: No space left on device (28)",
            "n1:52:77 [0] misc/shmutils.cc:132 NCCL WARN Error while creating shared memory segment "
            "/dev/shm/nccl-a1B2c3 (size 33030528)",
        ),
        pattern=r"(?:posix_)?fallocate failed ?: .*No space left|failed to extend \S*/dev/shm/\S+ to \d+ bytes"
        r"|while creating shared memory segment \S+ \(size \d+\)",
        classes=(Class.SHM_TOO_SMALL,),
        sure=Sureness.CERTAIN,
        says="NCCL could not get room in /dev/shm",
        remedy=(
            "docker run --shm-size=16g (or --ipc=host)",
            "Kubernetes: volumes: [{name: shm, emptyDir: {medium: Memory, sizeLimit: 16Gi}}] mounted at /dev/shm",
        ),
        decides=("shm",),
        versions="NCCL 2.10 (shm.h), 2.12 to 2.21 (shmutils.cc), 2.22 and later (failed to extend)",
        source="NCCL src/misc/shmutils.cc",
    ),
)
