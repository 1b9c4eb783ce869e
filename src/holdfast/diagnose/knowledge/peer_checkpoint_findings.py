"""Explains the findings about peer checkpoints, which keep ranks' state in other nodes' memory.

One row per code: its cause, how to confirm it, what to do.
"""

from __future__ import annotations

ROWS: tuple[tuple[str, str, str, str], ...] = (
    (
        "peer-checkpoints-unsupported",
        "The job sets `recovery.peer_checkpoints` but cannot use it: it has replicas, or a launcher starts its ranks.",
        "The job's `recovery.replicas` and `launch`.",
        "Leave it out. A lost replica already catches up from another replica's memory.",
    ),
    (
        "peer-checkpoints-single-node",
        "The job sets `recovery.peer_checkpoints` and has one node, whose memory is lost with it.",
        "The job's `nodes`.",
        "Write `nodes: 2` or more, or leave it out; peer checkpoints still help when ranks die and their node "
        "survives.",
    ),
    (
        "peer-checkpoints-within-group",
        "Some nodes keep their peer checkpoint on a node of the same parallel group.",
        "The program's parallel groups: no placement gives every node a backup node outside all of its groups.",
        "Nothing: the run survives the loss of any single node.",
    ),
    (
        "peer-checkpoints-stopped",
        "A peer checkpoint could not be created or sent: the node lacks memory for four times a rank's state, "
        "or another rank was gone.",
        "The evidence; that node's free memory.",
        "Restarted ranks create peer checkpoints again. Add memory, or run fewer ranks per node.",
    ),
    (
        "peer-checkpoint-not-bit-exact",
        "Something other than the optimizer changed weights during the copy.",
        "Whether the loop changes weights after session.commit().",
        "Nothing: from then on holdfast copies them before the next step begins.",
    ),
    (
        "state-restored-from-peers",
        "Ranks resumed from peer checkpoints in the nodes' memory.",
        "The evidence names the ranks whose state came from another node; each passed its checksum.",
        "Nothing.",
    ),
    (
        "peer-checkpoints-incomplete",
        "The nodes' memory held peer checkpoints, but of no step for all ranks.",
        "Check whether a node and its backup node were lost together, or the number of ranks changed.",
        "Nothing: the run resumed from the newest checkpoint.",
    ),
    (
        "peer-checkpoint-corrupt",
        "A peer checkpoint in memory does not match its checksum.",
        "The finding names the node.",
        "Test that node's memory; the run resumed from another peer checkpoint, or from the newest checkpoint.",
    ),
    (
        "checkpoint-store-skipped",
        "The checkpoint store did not answer at a start; the run resumed from a state in the nodes' memory.",
        "The evidence is the store client's error.",
        "Fix the store soon: until then only the nodes' memory holds the training state.",
    ),
)
