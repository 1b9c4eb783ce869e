"""Owns what the findings mean that are about copies of the ranks' states in other nodes' memory.

One row for each code: its cause, how to confirm it, what to do.
"""

from __future__ import annotations

ROWS: tuple[tuple[str, str, str, str], ...] = (
    (
        "peer-checkpoints-unsupported",
        "`recovery.peer_checkpoints` of a job that cannot make copies: it has replicas, or a launcher starts its ranks.",
        "The job's `recovery.replicas` and `launch`.",
        "Leave it out. A replica that is lost catches up from another's memory as it is.",
    ),
    (
        "peer-checkpoints-single-node",
        "`recovery.peer_checkpoints` of a job of one node: what its memory holds is lost with it.",
        "The job's `nodes`.",
        "Write `nodes: 2` or more, or leave it out; copies still serve when ranks die and their node does not.",
    ),
    (
        "peer-checkpoints-within-group",
        "Some nodes' copies lie on a node that works together with them in a parallel group.",
        "The groups that the program makes: no placement leaves each node one that shares none of its groups.",
        "Nothing need be done: any single node's loss is survived.",
    ),
    (
        "peer-checkpoints-stopped",
        "A copy could not be made or sent: no memory for four times a rank's state, or another rank was gone.",
        "The evidence; free memory of that node.",
        "Ranks that are started again copy again. Have more memory, or fewer ranks on a node.",
    ),
    (
        "peer-checkpoint-not-bit-exact",
        "Weights were changed by another than the optimiser while they were copied.",
        "Whether the loop changes weights after session.commit().",
        "Nothing: they are copied before the next step begins from then on.",
    ),
    (
        "state-restored-from-peers",
        "Ranks went on from copies in the nodes' memory.",
        "The evidence says whose came from another node; each was checked against what it summed up to.",
        "Nothing.",
    ),
    (
        "peer-checkpoints-incomplete",
        "There were copies in the nodes' memory, and of no step those of all ranks.",
        "Whether a node and the one that kept its copies were lost together, or the number of ranks changed.",
        "Nothing: the newest checkpoint was gone on from.",
    ),
    (
        "peer-checkpoint-corrupt",
        "A copy in memory was not what it summed up to when it was made.",
        "The finding says on whose node.",
        "Test that node's memory; another copy, or the newest checkpoint, was gone on from.",
    ),
    (
        "checkpoint-store-skipped",
        "The store of checkpoints did not answer at a start, and the nodes' memory had a state to go on from.",
        "The evidence is what the store's client said.",
        "Mend the store soon: until then nothing but memory has the training's state.",
    ),
)
