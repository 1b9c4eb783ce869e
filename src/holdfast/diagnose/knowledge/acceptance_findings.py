"""Explains the findings of `holdfast accept`. One row per code: its cause, how to confirm it, what to do."""

from __future__ import annotations

_RUN = "`holdfast report RUN` of the run that the finding names."

ROWS: tuple[tuple[str, str, str, str], ...] = (
    (
        "acceptance-not-applicable",
        "The target has nothing that this check could judge, such as a scheduler or a second node.",
        "The finding says what.",
        "Nothing, or another target.",
    ),
    (
        "acceptance-not-found",
        "No acceptance of this name was begun in this folder.",
        "`ls .holdfast/acceptance`.",
        "Begin a new one without `--resume`.",
    ),
    (
        "acceptance-unreadable",
        "The record of an acceptance is damaged, or of another version.",
        "The file that the finding names.",
        "Begin a new one without `--resume`.",
    ),
    (
        "acceptance-run-failed",
        "A run that an acceptance check started failed, did not end in time, or made too few steps to compare.",
        f"{_RUN} `holdfast diagnose RUN`.",
        "Follow that run's own finding, which is in the evidence.",
    ),
    (
        "fabric-not-observed",
        "Nothing shows which network carried the traffic between nodes, so a promised fabric is unproven.",
        "`holdfast status RUN`: its line `fabric`.",
        "Give the job GPUs, so that NCCL logs what it uses, and leave NCCL_DEBUG_FILE unset.",
    ),
    (
        "fabric-below-agreed",
        "The largest all-reduce over all nodes is slower than the agreement requires.",
        "The rates of pairs in the evidence; `holdfast check --full`.",
        "One slow node or link points at its cable or adapter, slow pairs everywhere at the fabric or its settings.",
    ),
    (
        "scaling-below-agreed",
        "More nodes do less work each than the agreement requires; the finding names what takes longer.",
        "The profiled steps in the evidence; `holdfast report RUN` names slow ranks.",
        "Replace a slow node; else larger batches, fewer bytes between nodes, a faster network or loader.",
    ),
    (
        "scaling-inconclusive",
        "Steps of one run vary by more than what is lost on more nodes.",
        "The halves of one run, compared in the evidence.",
        "Run the check again while nothing else runs on the nodes, or raise `scaling.steps`.",
    ),
    (
        "half-gang",
        "A job had some of its nodes and waited for the others for longer than agreed.",
        "When nodes joined: `holdfast events RUN`.",
        "Admit jobs as a whole: Kueue or Volcano with all-or-nothing admission, or one Slurm allocation.",
    ),
    (
        "gang-deadlock",
        "Each of two jobs has nodes that the other waits for, and neither can start.",
        "When nodes joined: `holdfast events RUN` of both.",
        "Admit jobs as a whole: Kueue or Volcano with all-or-nothing admission, or one Slurm allocation.",
    ),
    (
        "priority-ignored",
        "A job of higher priority did not get the nodes of one with a lower priority.",
        "When both had their nodes: `holdfast events RUN`.",
        "Allow preemption in the queue, and check the values of the priority classes.",
    ),
    (
        "first-run-failed",
        "A documented command failed, or the run that the commands start did not succeed.",
        "The command and its last lines in the evidence.",
        "Correct the page, or what the command says is missing.",
    ),
    (
        "recovery-failed",
        "A run did not recover by itself from an injected fault.",
        f"{_RUN} `holdfast diagnose RUN`.",
        "Follow the run's own finding in the evidence.",
    ),
    (
        "faults-not-injected",
        "A run was over, or restarting, when the step of a fault came.",
        "`holdfast events RUN`: fault-injected.",
        "Raise `restart.steps_per_fault`.",
    ),
    (
        "faults-without-effect",
        "A fault was injected, and no failure followed, so that it proves no recovery.",
        "`holdfast events RUN`: fault-injected, and what follows.",
        "Raise `restart.steps_per_fault`: of two faults that come together one is enough to restart.",
    ),
    (
        "nothing-to-compare",
        "A program reports neither digests nor losses, or the run with faults did not reach the last step.",
        "`holdfast events RUN -o json`: the metrics of step-committed.",
        "Commit each step with a Session, with its loss.",
    ),
    (
        "no-usable-machine",
        "A target has no machine that a run may use, or this user may not list them.",
        "`holdfast nodes --on TARGET`.",
        "Release or repair machines, or set `nodes` in the agreement.",
    ),
    ("bad-agreement", "A field of `job` belongs to the checks.", "The finding names it.", "Remove it."),
    (
        "page-unreadable",
        "The page of the check `first-run` does not exist, or is no UTF-8 text.",
        "`ls -l` of the file.",
        "Correct `first_run.page`; it is relative to the agreement.",
    ),
    (
        "checkpoint-not-used",
        "After a failure a run did more steps again than the interval of its checkpoints explains.",
        "`holdfast report RUN`: steps done again; its checkpoints.",
        "Load the newest checkpoint at the start of the program, from a folder that every node reaches.",
    ),
    (
        "state-not-restored",
        "A run that resumed computes something else than a run without failures; the finding names what differs first.",
        "The digests of that step in both runs: `holdfast events RUN -o json`.",
        "Save and load that state too, or give it to the Session.",
    ),
    (
        "recovery-slow",
        "From a failure to the next step passed more time than agreed.",
        f"{_RUN}",
        "Shorten what took longest: detection (timeouts), a new node, imports (`recovery.prewarm`), the checkpoint.",
    ),
    (
        "ladder-not-found",
        "A folder has no job files for `holdfast accept ladder`.",
        "`ls FOLDER/*.yaml`.",
        "Name a folder of job files, such as `examples/ladder` of the repository.",
    ),
    ("no-such-check", "`holdfast accept` has no check of this name.", "`holdfast accept --help`.", "Choose another."),
)
