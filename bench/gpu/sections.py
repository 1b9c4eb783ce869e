"""The sections in the order in which they run, with their deadlines: the longest last, if time runs out."""

from __future__ import annotations

from functools import partial

from bench.gpu import llama, nccl_records, peers, probes, resume, saves, starts, steps, titan
from bench.gpu.promises import (
    FLIGHT_RECORDER,
    KILL_COLD,
    KILL_PREWARMED,
    LAUNCH,
    LLAMA_MFU,
    LLAMA_STEP,
    LOAD,
    NCCL_LOG,
    NCCL_REFUSAL,
    OVERHEAD_LEFT,
    OVERHEAD_READ,
    PARTS_ADD_UP,
    PEER_COST,
    PEER_SHARE,
    PROBE_ALL_REDUCE,
    PROBE_MATMUL,
    PROBE_MEMORY,
    PROFILE_COST,
    RESUME,
    SAVE_SIZES_GB,
    STALL,
    TITAN_MFU,
    TITAN_STEP,
    WRITE,
)
from bench.gpu.section import Section

SAVE_DEADLINES_S = {2: 70.0, 8: 80.0, 24: 200.0}

SECTIONS = (
    Section(
        name="nccl",
        measure=nccl_records.measure,
        deadline_s=40.0,
        claims=(NCCL_REFUSAL, FLIGHT_RECORDER, NCCL_LOG),
    ),
    Section(
        name="probes",
        measure=probes.measure,
        deadline_s=45.0,
        claims=(PROBE_MATMUL, PROBE_MEMORY, PROBE_ALL_REDUCE),
    ),
    Section(name="resume", measure=resume.measure, deadline_s=90.0, claims=tuple(RESUME.values())),
    Section(name="session", measure=steps.measure_overhead, deadline_s=40.0, claims=(OVERHEAD_READ, OVERHEAD_LEFT)),
    Section(name="profile", measure=steps.measure_profile, deadline_s=30.0, claims=(PARTS_ADD_UP, PROFILE_COST)),
    Section(name="llama", measure=llama.measure, deadline_s=100.0, claims=(LLAMA_STEP, LLAMA_MFU)),
    Section(name="titan", measure=titan.measure, deadline_s=60.0, claims=(TITAN_STEP, TITAN_MFU)),
    Section(name="starts", measure=starts.measure, deadline_s=110.0, claims=(LAUNCH, KILL_COLD, KILL_PREWARMED)),
    Section(name="peers", measure=peers.measure, deadline_s=50.0, claims=(PEER_COST, PEER_SHARE)),
    *(
        Section(
            name=f"save-{size}",
            measure=partial(saves.measure, size_gb=size),
            deadline_s=SAVE_DEADLINES_S[size],
            claims=(STALL[size], WRITE[size], LOAD[size]),
        )
        for size in SAVE_SIZES_GB
    ),
)
