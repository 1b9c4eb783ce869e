"""Owns what the findings mean that a run raises: failures of ranks and nodes, warnings, and faults of holdfast itself.

One row for each code: its cause, how to confirm it, what to do.
"""

from __future__ import annotations

_DIAGNOSE = "`holdfast diagnose RUN`."
_DISK = "`df -h`, `df -i`, `mount` and `dmesg` on that machine."

ROWS: tuple[tuple[str, str, str, str], ...] = (
    # How an attempt ends
    (
        "rank-crashed",
        "A rank's program ended with an error of its own.",
        f"{_DIAGNOSE} It shows the rank that was first and its last error.",
        "Mend that error; the others only lost their peer.",
    ),
    (
        "rank-killed",
        "A signal ended a rank that holdfast did not send.",
        f"{_DIAGNOSE} Then `holdfast explain` with the signal's name.",
        "Find out who sent it: the kernel, the scheduler, a person, or the program itself.",
    ),
    (
        "rank-out-of-memory",
        "The kernel ended a rank because its node or cgroup had no memory left; its own word for it was found.",
        "`dmesg -T | grep -i 'killed process'`, memory.events of the cgroup.",
        "Fewer DataLoader workers, less pinned memory, sharded loading; or more memory.",
    ),
    (
        "rank-hung",
        "A rank passed no step within recovery.step_deadline_s.",
        f"{_DIAGNOSE} The stacks that were taken show where each rank stands: it is the one that waits for no other.",
        "Mend what that rank waits for: data, a lock, a collective that the others do not make.",
    ),
    (
        "node-lost",
        "A node, or the agent on it, is gone or out of reach for longer than recovery.node_grace_s.",
        "The place's word in the evidence; the agent's log; the machine itself.",
        "Nothing while it is replaced; the same machine again and again: take it out of use.",
    ),
    (
        "node-preempted",
        "A node's agent got SIGTERM: the place takes the node away, and its ranks had recovery.stop_grace_s to save.",
        "The place's own word: evictions, preemptions, spot notices, maintenance.",
        "Nothing: all ranks end, the node is replaced, and the run goes on from what they saved. When the place gives "
        "less time than recovery.stop_grace_s, set that lower.",
    ),
    (
        "node-never-joined",
        "A node was made and its agent never spoke to the controller.",
        "nodes/nodeN.*/agent.log in the run's folder; whether it reaches the controller's address and port.",
        "Open the way from node to controller; mend what the agent's log says.",
    ),
    (
        "program-not-started",
        "The operating system could not start the command.",
        "`command -v PROGRAM` on that node; the evidence.",
        "Mend the command or the working directory.",
    ),
    (
        "code-not-delivered",
        "A node could not fetch the job's code from the controller.",
        "The evidence; room on the node's disk.",
        "Make room, or open the way to the controller.",
    ),
    (
        "rendezvous-port-taken",
        "Somebody else listened on the port at which the ranks were to meet.",
        "`ss -ltnp` on that node.",
        "Nothing: the next attempt has a fresh port.",
    ),
    (
        "no-room-to-start",
        "The node had no processes, open files or memory to give.",
        "`ulimit -a`, pids.max of the cgroup, `free -h` on that node.",
        "Raise the limit, or end what else runs there.",
    ),
    (
        "attempt-unexplained",
        "The attempt ended, and the log that should say why lost a line.",
        "`holdfast events`; the disk's health.",
        "Look after the disk.",
    ),
    # Disks and limits
    ("disk-full", "No space, no inodes or no quota is left.", _DISK, "Free some, or use another file system."),
    ("read-only-file-system", "It was mounted so, or the kernel made it so after errors.", _DISK, "Mend the disk."),
    ("disk-error", "The disk failed to read or write.", _DISK, "Replace it."),
    ("disk-has-room", "What waited for space goes on.", _DISK, "Nothing."),
    ("too-many-open-files", "A limit on open files was reached.", "`ls /proc/PID/fd`, `ulimit -n`.", "Raise it."),
    ("too-many-processes", "A limit on processes was reached.", "`ulimit -u`, pids.max of the cgroup.", "Raise it."),
    ("no-memory", "The kernel refused memory.", "`free -h`, `ulimit -v`.", "Ask for less."),
    (
        "memory-pressure",
        "Nearly all memory of a node or cgroup is in use; the kernel ends a rank next.",
        "`free -h`, memory.current of the cgroup.",
        "Fewer DataLoader workers, a smaller cache.",
    ),
    # Watching
    ("gpu-occupied", "Somebody else's process holds memory of a GPU of the job.", "`nvidia-smi`.", "End it."),
    (
        "ignored-sigterm",
        "A rank did not end when it was asked to, and was killed.",
        "Its handler for SIGTERM; recovery.stop_grace_s.",
        "Let it end, or give it more time.",
    ),
    (
        "left-processes",
        "A rank's command ended and left children behind, which were ended.",
        "The finding names them.",
        "Have the program wait for its children.",
    ),
    ("log-trimmed", "A rank wrote more than its log may hold.", "`logs.max_bytes`.", "Write less, or raise it."),
    ("log-unlimited", "A rank's log cannot be cut from the front here.", "The file system.", "Write less."),
    (
        "clock-jumped",
        "The wall clock of a machine was set while a run went on.",
        "`timedatectl`, `chronyc tracking` there.",
        "Keep clocks by NTP; times of the run are on a clock that does not jump.",
    ),
    (
        "world-growing",
        "Nodes that were missing are there again, and take part after a checkpoint.",
        "`holdfast status`.",
        "Nothing.",
    ),
    # The controller
    (
        "controller-gone",
        "The run's controller has died and its keeper with it.",
        "The end of controller.log.",
        "`holdfast attach RUN` starts it again.",
    ),
    ("controller-silent", "The controller is busy, stopped or starting.", "`holdfast status`.", "Try again."),
    ("controller-port-taken", "Somebody took its port while it was away.", "`ss -ltnp`.", "Nothing: it moved."),
    ("start-failed", "The keeper of a run did not start.", "The end of controller.log.", "Mend what it says."),
    ("request-refused", "The controller did not accept a request.", "The evidence.", "Report it."),
    ("run-holds", "The run's log cannot be written, so the run waits.", _DISK, "Make room."),
    ("event-log-damaged", "Lines of the event log are damaged; nothing depends on them.", _DISK, "Watch the disk."),
    ("event-log-broken", "The event log is damaged where it matters.", _DISK, "Start the job anew."),
    ("internal", "A fault of holdfast's own.", "The file that the finding names.", "Report it with that file."),
    # Drills and nodes with a network of their own
    ("drill-unavailable", "This place cannot do that drill.", "The evidence.", "As the finding says."),
    ("netns-command-failed", "A command that sets up a node's network failed.", "The evidence.", "As it says."),
    ("netns-exists", "A network of that name is left over.", "`ip netns`.", "Remove it."),
    ("netns-full", "More nodes than a network has addresses for.", "`nodes`.", "Fewer nodes."),
    ("netns-no-free-subnet", "This machine's routes cover every private range.", "`ip route`.", "Free a /24."),
    ("netns-not-found", "The network or node is gone.", "`ip netns`.", "Start the run anew."),
    ("netns-processes-stay", "Processes of a node do not end.", "`ps` for state D.", "Look at what they wait for."),
    ("netns-unavailable", "The kernel allows no namespaces here.", "`unshare -rn true`.", "`isolation: process`."),
    # Inside a rank
    (
        "attempt-superseded",
        "A rank of an older attempt still ran when a newer one had taken over; it may commit nothing.",
        "`holdfast events`.",
        "Nothing: it ends by itself.",
    ),
    (
        "checkpoint-cadence",
        "`checkpoint.every: auto` has chosen how often to save.",
        "The evidence: what one costs, and how often a failure is expected.",
        "Nothing; `checkpoint.every_s` fixes it.",
    ),
    (
        "checkpoint-damaged",
        "A checkpoint's files are not what was written.",
        "The folder's disk.",
        "Nothing: set aside.",
    ),
    (
        "checkpoint-does-not-fit",
        "The model or optimiser is another one than the checkpoint's.",
        "The evidence names the first difference.",
        "The same model, or another checkpoint.path.",
    ),
    ("checkpoint-failed", "A checkpoint could not be written.", _DISK, "Make room; older ones stay."),
    (
        "checkpoint-from-later-version",
        "A newer holdfast wrote the checkpoint.",
        "`pip show holdfast` in the image.",
        "That version, or a newer one.",
    ),
    (
        "checkpoint-not-sealed",
        "What a framework saved could not be read back and sealed, so it is not trusted.",
        _DISK + " Whether every node reaches the folder.",
        "Room; a folder that all nodes share. Older ones stay.",
    ),
    (
        "checkpoint-not-taken",
        "A checkpoint that was asked for did not come.",
        "The evidence says what was waited for; `holdfast status`.",
        "Ask again once ranks pass steps; a program without a Session takes none.",
    ),
    (
        "checkpoint-withheld",
        "A checkpoint was due while a loss was no number, and was not taken.",
        "`holdfast events`: `loss-not-finite` beside it.",
        "As for `loss-not-finite`; the newest checkpoint is of before.",
    ),
    (
        "loss-not-finite",
        "The loss of a rank is NaN or infinite.",
        "The evidence: the step, the norm of the gradients, whether it was so before.",
        "From the newest checkpoint, with a lower learning rate, clipped gradients, or without that step's samples.",
    ),
    (
        "metric-not-finite",
        "A figure other than the loss is NaN or infinite.",
        "The program that logs it.",
        "Nothing, if that is what it should be.",
    ),
    (
        "no-session",
        "No rank of a node has opened a Session, so a checkpoint can be asked of none.",
        "Whether the program has the lines of holdfast.train.",
        "Add them; ranks that are still starting will have one.",
    ),
    (
        "checkpoint-passed-over",
        "A framework's checkpoint has no seal, or is not what its seal says.",
        "The evidence; whether something died while it was written.",
        "Nothing: an older one is used.",
    ),
    (
        "data-began",
        "Other data begins here, as the script asked with `first`.",
        "`Data(..., first=...)` in the script.",
        "Nothing.",
    ),
    (
        "data-begins-later",
        "`Data(..., first=...)` names a sample that training has not come to.",
        "The number of samples taken, in the finding.",
        "The data that comes before, or another `first`.",
    ),
    (
        "data-cache-unwritable",
        "The tokens made of a text cannot be kept on disk.",
        "The folder's rights and room.",
        "`Text(..., cache=...)` with another folder.",
    ),
    (
        "data-changed",
        "The data, its seed or its order is another one than the checkpoint's.",
        "The evidence says what was and what is.",
        "The data as it was, or `Data(..., first=...)` to change it on purpose.",
    ),
    (
        "data-empty",
        "The dataset has no samples, or gave them once and no more.",
        "Where it is read from, and what is filtered out.",
        "Data that can be read again.",
    ),
    (
        "data-not-a-dataset",
        "What was given as data has neither items with numbers nor an order.",
        "Its type.",
        "Something with __len__ and __getitem__, or with __iter__.",
    ),
    (
        "data-skipped",
        "A stream that cannot go on from where it stood was read again up to there.",
        "The seconds it took.",
        "state_dict and load_state_dict on the stream.",
    ),
    (
        "data-smaller-than-batch",
        "An epoch has fewer samples than a step takes.",
        "Both numbers, in the finding.",
        "A smaller batch, or more data.",
    ),
    (
        "data-state-inexact",
        "A stream's own state does not lead back to where it stood, as with a shuffle buffer.",
        "The stream's documentation.",
        "Nothing: it was read again from the epoch's beginning.",
    ),
    (
        "data-unreadable",
        "A file of the data is missing, cut short, or not what its name says; or a row has no text.",
        "The file and line in the finding.",
        "Fetch the file anew, or name the column.",
    ),
    (
        "data-worker-lost",
        "A process that reads data ahead was killed.",
        "The kernel's log: most often memory.",
        "Fewer workers, or more memory.",
    ),
    (
        "checkpoint-inexact",
        "Weights were changed by something other than the optimiser while they were copied.",
        "What runs between two steps: hooks, averages, pruning.",
        "Nothing: from then on copies are made before the loop goes on.",
    ),
    (
        "checkpoints-in-use",
        "Another run that is alive saves its checkpoints in the same folder.",
        "`holdfast ps`; `writer-0.json` in the folder names it.",
        "Another checkpoint.path, or end that run.",
    ),
    (
        "environment-not-a-number",
        "A variable that holdfast reads in a rank is no number.",
        "`printenv`.",
        "Unset it, or mend it.",
    ),
    (
        "global-batch-changed",
        "A step takes another number of samples than before the restart.",
        "Batch and world size then and now.",
        "Look at the learning rate; each sample is still taken once.",
    ),
    (
        "no-good-checkpoint",
        "There are checkpoints, and every one of them is damaged.",
        "The storage; the evidence says what each file was found to be.",
        "Mend the storage; the next start begins at step 0.",
    ),
    (
        "process-group-missing",
        "A Session of several ranks was made before torch.distributed.init_process_group.",
        "The script's order.",
        "Initialise the process group first.",
    ),
    (
        "step-not-committed",
        "The loop body ended without exactly one session.commit.",
        "The script's loop.",
        "Call commit once in every step.",
    ),
    ("text-too-short", "The text is shorter than one sample.", "Its size.", "More text, or shorter samples."),
    (
        "trainer-resumes-inexactly",
        "Arguments of the Trainer keep a resumed training from being exact.",
        "The evidence names each.",
        "Leave them out, unless they are meant.",
    ),
    (
        "trainer-without-its-ranks",
        "The Trainer trains alone on each rank.",
        "WORLD_SIZE, and what the Trainer counts.",
        "On CPUs use_cpu=True and ddp_backend='gloo'.",
    ),
    (
        "world-size-changed",
        "The checkpoint was taken by another number of ranks.",
        "WORLD_SIZE then and now.",
        "Nothing, if it was meant.",
    ),
)
