"""Owns what the findings mean that an update of a run raises: why it cannot be, and how ranks went on.

One row for each code: its cause, how to confirm it, what to do.
"""

from __future__ import annotations

ROWS: tuple[tuple[str, str, str, str], ...] = (
    (
        "bad-when",
        "An update was asked for at a time that is none.",
        "`holdfast update --help`.",
        "Write now, restart, or a number of seconds.",
    ),
    (
        "code-edited",
        "Files of a program that runs in place were edited while it ran, and a restart started the edited ones.",
        "The evidence lists the files, their sizes then and now, and when they changed; `git diff` shows what changed.",
        "Nothing, if you meant it. Else put the files back and `holdfast update`, or ship code with `code: shipped`.",
    ),
    (
        "code-in-place",
        "An update named a folder of code, and this run's ranks run in place: there is no copy that could be another.",
        "`holdfast target`: `code: shipped` ships copies.",
        "Change the files where they lie, and leave `--code` out.",
    ),
    (
        "code-unchanged",
        "An update would start the code that runs.",
        "`holdfast status` shows its digest.",
        "Change the code first, or name another folder.",
    ),
    (
        "update-in-progress",
        "An update was asked for while another had begun and had not made its steps.",
        "`holdfast events`.",
        "Ask again once the first is over.",
    ),
    (
        "update-failed",
        "New code could not be had by the nodes, or failed within its first steps.",
        "The evidence; `holdfast diagnose RUN` for the ranks' own words.",
        "Mend the code and update again; the run goes on with the code it had.",
    ),
    (
        "update-not-confirmed",
        "No step with the new code was seen in time; the update itself goes on.",
        "`holdfast status`, `holdfast events`.",
        "Nothing, if steps are long.",
    ),
    (
        "update-without-steps",
        "An update at once was asked for while no rank had reported a step: it would have restarted the program.",
        "Whether the program has a holdfast.train Session; `holdfast status` shows its step.",
        "Wait for the first step; without a Session, `--when restart`, or cancel the run and start it again.",
    ),
    (
        "state-transfer-skipped",
        "Ranks that had told of no step were stopped for an update.",
        "Whether the program has a holdfast.train Session, and had made a step since it was started.",
        "Nothing where ranks save their own checkpoints; a Session hands over the very step.",
    ),
    (
        "state-transfer-done",
        "Ranks went on from what those before them had left in their nodes' memory.",
        "It was checked against what it summed up to, on every rank.",
        "Nothing.",
    ),
    (
        "state-transfer-refused",
        "What ranks had left in memory was not there on every node, or not the same step, or damaged.",
        "The finding says which rank's; a node that was lost took its part along.",
        "Nothing: the newest checkpoint was gone on from. Damaged memory: test the node's.",
    ),
    (
        "state-transfer-failed",
        "A rank could not leave its state in memory.",
        "Free memory of that node; ranks that a launcher starts are given none to leave it in.",
        "Nothing: a checkpoint is taken instead. Room for one rank's state for each rank avoids it.",
    ),
)
