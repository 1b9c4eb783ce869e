"""The context in which tests fork ranks, from a process that has imported what they need.

A fork of the worker itself could not compute gradients once a test has started autograd's threads there. A worker has
one such process, and only the last list of modules counts: where modules had their own lists, they took each other's
away, and every rank imported what was missing.
"""

from __future__ import annotations

from multiprocessing import get_context

PRELOADED = (
    "holdfast.train.ft.replica_group",
    "tests.train.replica_job",
    "tests.train.replica_matrix",
    "tests.train.diverging_job",
    "tests.train.hanging_ranks",
    "bench.silent_corruption",
    "tests.programs.huge_pages_now",  # last: it moves into huge pages what the others have imported
)

forks = get_context("forkserver")
forks.set_forkserver_preload([*PRELOADED])
