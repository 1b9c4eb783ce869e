"""Explains the findings of a code update: why it is impossible, and how ranks resumed.

One row per code: its cause, how to confirm it, what to do.
"""

from __future__ import annotations

ROWS: tuple[tuple[str, str, str, str], ...] = (
    (
        "bad-when",
        "`--when` has an invalid value.",
        "`holdfast update --help`.",
        "Write now, restart, or a number of seconds.",
    ),
    (
        "code-edited",
        "The code of a program that runs in place changed during the run, and a restart started the changed code.",
        "The evidence lists the files, their sizes then and now, and when they changed; `git diff` shows what changed.",
        "Nothing, if intended. Else restore the files and run `holdfast update`, or ship code with `code: shipped`.",
    ),
    (
        "code-in-place",
        "An update names a code folder, but this run's ranks run in place: there is no copy to replace.",
        "`holdfast target`: `code: shipped` ships copies.",
        "Change the files in place, and leave `--code` out.",
    ),
    (
        "code-unchanged",
        "The update contains the same code that is running.",
        "`holdfast status` shows its digest.",
        "Change the code first, or name another folder.",
    ),
    (
        "update-in-progress",
        "An update was requested while another had not finished its first steps.",
        "`holdfast events`.",
        "Try again once the first update has finished.",
    ),
    (
        "update-failed",
        "Nodes could not fetch the new code, or it failed within its first steps.",
        "The evidence; `holdfast diagnose RUN` for the ranks' errors.",
        "Fix the code and update again; the run continues with the old code.",
    ),
    (
        "update-not-confirmed",
        "holdfast saw no step with the new code in time; the update itself continues.",
        "`holdfast status`, `holdfast events`.",
        "Nothing, if steps are long.",
    ),
    (
        "update-without-steps",
        "`--when now` was used before any rank had reported a step: it would have restarted the program.",
        "Whether the program has a holdfast.train Session; `holdfast status` shows its step.",
        "Wait for the first step; without a Session, `--when restart`, or cancel the run and start it again.",
    ),
    (
        "state-transfer-skipped",
        "Ranks that had reported no step were stopped for an update.",
        "Whether the program has a holdfast.train Session, and had made a step since it was started.",
        "Nothing if ranks save their own checkpoints; a Session hands over the exact step.",
    ),
    (
        "state-transfer-done",
        "Ranks resumed from the state that their predecessors left in the nodes' memory.",
        "The state passed its checksum on every rank.",
        "Nothing.",
    ),
    (
        "state-transfer-refused",
        "The state that ranks left in memory was missing on a node, of different steps, or damaged.",
        "The finding names the rank; a lost node takes its part along.",
        "Nothing: the run resumed from the newest checkpoint. Damaged memory: test the node's.",
    ),
    (
        "state-transfer-failed",
        "A rank could not leave its state in memory.",
        "Free memory of that node; ranks started by a launcher get no memory to leave it in.",
        "Nothing: holdfast takes a checkpoint instead. Free memory for one more copy of each rank's state avoids it.",
    ),
)
