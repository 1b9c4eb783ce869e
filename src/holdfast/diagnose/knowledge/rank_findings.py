"""Explains the findings that a rank raises: its Session, checkpoints, data, replicas and metrics.

One row per code: its cause, how to confirm it, what to do. A long file, because it is one table.
"""

from __future__ import annotations

from holdfast.diagnose.knowledge.run_findings import CHECK_DISK

ROWS: tuple[tuple[str, str, str, str], ...] = (
    (
        "attempt-superseded",
        "A rank of an older attempt still ran after a newer attempt had started; it may commit nothing.",
        "`holdfast events`.",
        "Nothing: it ends by itself.",
    ),
    (
        "checkpoint-interval",
        "`checkpoint.every: auto` has chosen the checkpoint interval.",
        "The evidence: the cost of one checkpoint, and the expected time between failures.",
        "Nothing; `checkpoint.every_s` sets a fixed interval.",
    ),
    (
        "local-checkpoint-lost",
        "Checkpoint files on the nodes' own disks are damaged, or some were lost with a node.",
        "The evidence; the disk of the node if a file was damaged.",
        "Nothing: the run resumes from the store's copy, or from the checkpoint before.",
    ),
    (
        "checkpoint-corrupt",
        "A checkpoint's files do not match their checksums.",
        "The folder's disk.",
        "Nothing: holdfast set it aside.",
    ),
    (
        "checkpoint-incompatible",
        "The model or optimizer differs from the checkpoint's.",
        "The evidence names the first difference.",
        "Use the same model, or another checkpoint.path.",
    ),
    (
        "host-memory-not-pinned",
        "CUDA could not pin the host memory that a GPU's state is copied to, so that copies are slower.",
        "`ulimit -l` in the ranks' environment; free memory on the node.",
        "Raise the limit on locked memory, or give the node more free memory; training continues meanwhile.",
    ),
    (
        "checkpoint-state-unsafe",
        "A state_dict holds an object of a type that is not loaded from a checkpoint, since that could run code.",
        "The evidence names the types; the finding, where the state_dict comes from.",
        "Return plain values, tensors or numpy arrays, or call torch.serialization.add_safe_globals([TYPE]).",
    ),
    (
        "checkpoint-failed",
        "A checkpoint could not be written: no space, no permission, or a disk error.",
        f"The evidence says which. {CHECK_DISK}",
        "Free some space, or fix what the evidence names; older checkpoints stay.",
    ),
    (
        "checkpoint-from-earlier-version",
        "An older holdfast wrote the checkpoint, in a format that this version does not read.",
        "`pip show holdfast` in the image, then and now.",
        "Use the version that wrote it, or another checkpoint.path. Nothing was renamed or removed.",
    ),
    (
        "checkpoint-from-later-version",
        "A newer holdfast wrote the checkpoint.",
        "`pip show holdfast` in the image.",
        "Use that version, or a newer one.",
    ),
    (
        "checkpoint-manifest-missing",
        "A framework's checkpoint could not be read back to write its manifest, so holdfast does not trust it.",
        CHECK_DISK + " Check that every node reaches the folder.",
        "Free space; a folder that all nodes share. Older checkpoints stay.",
    ),
    (
        "checkpoint-not-taken",
        "A requested checkpoint was not taken in time.",
        "The evidence names what it waited for; `holdfast status`.",
        "Request it again once ranks pass steps; a program without a Session takes no checkpoints.",
    ),
    (
        "checkpoint-skipped-nonfinite",
        "A checkpoint was due while a loss was NaN or infinite, and was skipped.",
        "`holdfast events`: `loss-not-finite` next to it.",
        "As for `loss-not-finite`; the newest checkpoint predates it.",
    ),
    (
        "tcp-store-not-hosted",
        "The agent could not host the TCPStore of a replica's ranks.",
        "The evidence, and the file with the output of the hosting process.",
        "Install torch in the command's Python, or set TORCHELASTIC_USE_AGENT_STORE to False in `env`.",
    ),
    (
        "stack-dump-incomplete",
        "A user requested the stacks of a run's ranks, and some agents did not answer in time.",
        "`holdfast status` shows what the run is doing, and which agents are unreachable.",
        "Try again; `py-spy dump --pid PID` on the node does the same.",
    ),
    (
        "step-profile-unavailable",
        "A requested step profile was not taken in time.",
        "The evidence names what it waited for; `holdfast status`.",
        "Request it again once ranks pass steps; a program whose steps are not counted cannot be profiled.",
    ),
    (
        "memory-snapshot-unavailable",
        "`holdfast profile --memory` was requested of ranks that use no GPU, or a snapshot could not be kept.",
        "The evidence says why, for each rank; the trace of the same steps is kept.",
        "Request it of ranks that use a GPU, while no other profile runs.",
    ),
    (
        "nsys-missing",
        "`holdfast profile --nsys` was requested for a run of this machine, which has no `nsys`.",
        "`which nsys`.",
        "Install Nsight Systems' command line, such as NVIDIA's package `nsight-systems-cli`.",
    ),
    (
        "nsys-not-rendered",
        "The job's `launch` adds options to its launcher's command, which holdfast does not find behind `nsys`.",
        "`launch` in the job: accelerate, deepspeed or mpi.",
        "Write `nsys profile` into the launcher's own command, before the training program.",
    ),
    (
        "bad-ranks",
        "The ranks for `holdfast profile --ranks` are no numbers, not of this run, or too many.",
        "`holdfast status` shows how many ranks the run has.",
        "Write their numbers, such as 0,5; without `--ranks` rank 0, the slowest and the fastest rank keep a trace.",
    ),
    (
        "step-profile-failed",
        "A rank could not profile its steps.",
        "The evidence: the program's own profiler was active, or the error of torch's profiler.",
        "Request it again while the program does not profile itself.",
    ),
    (
        "loss-not-finite",
        "The loss of a rank is NaN or infinite.",
        "The evidence: the step, the norm of the gradients, whether it was so before.",
        "Resume from the newest checkpoint with a lower learning rate, clipped gradients, or without that "
        "step's samples.",
    ),
    (
        "weights-not-finite",
        "Weights or optimizer state became NaN or infinite, so that nothing computed from them is right.",
        "The evidence: the rank whose loss or gradient was the first, its parameter group, and the step.",
        "Nothing at first: all ranks stop, their nodes are checked, and the run resumes from a checkpoint of before. "
        "If it returns at the same step: a lower learning rate, clipped gradients, or without that step's samples.",
    ),
    (
        "gradient-not-finite",
        "A gradient of a rank was NaN or infinite, and the weights still are finite: the update was skipped.",
        "The evidence: the parameter group, and the first parameter in it.",
        "Nothing, if it is rare: loss scaling does this until its scale fits.",
    ),
    (
        "loss-spike",
        "The loss of a rank is at least 5 times its running median, and twice its highest recent value.",
        "`holdfast events`: whether it recovers within some steps. The samples of that step.",
        "Nothing, if it recovers. Else resume from a checkpoint of before with a lower learning rate, or without "
        "those samples; `watch.spikes: act` restarts from the last checkpoint immediately.",
    ),
    (
        "gradient-spike",
        "The gradient norm is at least 5 times its running median, and twice its highest recent value.",
        "`holdfast events`: whether the loss follows.",
        "As for `loss-spike`; clipped gradients limit its effect.",
    ),
    # Slow ranks
    (
        "straggler",
        "A rank's own time for a step, without waits for others or for a CPU, is longer than the others': by 8 % for "
        "20 steps, or by 30 % for 3 steps that cost a second. In communication: it is late although its own time is "
        "not longer.",
        "The phase in the finding. `holdfast profile`: the breakdown of a step. Clocks and temperature of its device.",
        "Compare its device, disk or network with the other nodes'. `watch.stragglers: act` replaces its node if a "
        "standby node or another replica can take its place.",
    ),
    (
        "run-slow",
        "Steps take at least a ninth longer than in the run's best stretch of 60 steps, for 60 steps.",
        "The evidence: which part of a step has grown, and what else was reported meanwhile.",
        "Begin with the part that has grown most. Forward and backward on all ranks: clocks, throttling, samples.",
    ),
    (
        "traffic-stopped",
        "A node's ranks exchanged data with other nodes, and have not for ten minutes: they may all wait for one rank.",
        "The comparison of five dumps of stacks that follows; `holdfast diagnose RUN --stacks` takes more.",
        "Nothing, if they evaluate, compile or write a checkpoint.",
    ),
    (
        "rank-waited-for",
        "In most of five dumps of a slow run's stacks, the other ranks wait for this rank, and it waits for none.",
        "Its frames in the evidence; `holdfast diagnose RUN --stacks` takes five more dumps.",
        "Fix what its frames show. If it waits for its device: the device, or the node's network.",
    ),
    (
        "data-stall",
        "A rank waits for samples in 30 % of each of 20 steps, or once for over a second and ten times its median; or "
        "longer than the other ranks, which wait for it.",
        "`data_wait_s` of the steps; CPU use of DataLoader workers; read latency of the data's disk.",
        "More or faster workers, fewer bytes per sample, data on a nearer disk.",
    ),
    (
        "memory-growing",
        "The memory of a rank, or of its GPU, grows without slowing down, and will be used up within an hour.",
        "`host_memory_peak_bytes` and `memory_peak_bytes` of the steps; `torch.cuda.memory_summary()` in the program.",
        "Find what is kept of each step: lists of losses that are tensors, graphs, caches without a limit. Take a "
        "checkpoint before it ends: `holdfast checkpoint`.",
    ),
    (
        "metric-not-finite",
        "A metric other than the loss is NaN or infinite.",
        "Check the program that logs it.",
        "Nothing, if that value is expected.",
    ),
    (
        "metric-dropped",
        "A metric that does not fit into an event was dropped; its step and the other metrics count.",
        "The finding names the metric and the reason: its name, its value, or too many metrics in a step.",
        "Pass one finite number per metric, under a short name.",
    ),
    (
        "rank-channel-missing",
        "Ranks cannot reach their agent: its socket could not be created, or no longer exists.",
        "The evidence: each folder that was tried, and the system's error; `df` and `df -i` of it.",
        "Free space in that folder, or set XDG_RUNTIME_DIR; the next start tries again. The ranks keep "
        "training, unmonitored.",
    ),
    (
        "rank-messages-dropped",
        "A rank sent its agent data that is not a holdfast message, or more messages than an agent forwards.",
        "The finding counts them by reason, and shows the first.",
        "Let only a Session write to HOLDFAST_RANK_SOCKET.",
    ),
    (
        "no-session",
        "No rank of a node has opened a Session, so none can take a checkpoint on request.",
        "Check whether the program uses holdfast.train.",
        "Add a Session; ranks that are still starting will open theirs.",
    ),
    (
        "tracker-failed",
        "Metrics could not be sent to a tracker (TensorBoard, W&B, MLflow).",
        "The evidence: the tracker's own error.",
        "Fix that error; training continues, and the run's own log has the metrics.",
    ),
    (
        "tracker-unknown",
        "The job names a tracker that holdfast does not know.",
        "The finding names it; `pip list` in the image.",
        "Use a supported one, with its package in the image.",
    ),
    (
        "launcher-orphaned-ranks",
        "A launcher ended with code 0 while its ranks were still running.",
        "The evidence; the launcher's own last lines.",
        "Make the launcher wait for its ranks; find out why it left them.",
    ),
    (
        "checkpoint-skipped",
        "A framework's checkpoint has no manifest, or does not match it.",
        "The evidence; whether a process died while writing it.",
        "Nothing: holdfast uses an older one.",
    ),
    (
        "data-restarted",
        "Other data begins here, as the script requests with `start_sample`.",
        "`Data(..., start_sample=...)` in the script.",
        "Nothing.",
    ),
    (
        "data-starts-at-offset",
        "`Data(..., start_sample=...)` names a sample beyond the training position.",
        "The number of samples taken, in the finding.",
        "Use the data that comes before it, or another `start_sample`.",
    ),
    (
        "data-cache-corrupt",
        "A node's cached tokens of a text did not match their checksums; holdfast tokenised the text again "
        "before training.",
        "The evidence names the file and the first damaged block; the node's disk and memory.",
        "Nothing for this training. Replace the disk if it happens again.",
    ),
    (
        "data-cache-unwritable",
        "The tokens of a text cannot be cached on disk.",
        "The folder's permissions and free space.",
        "Use `Text(..., cache=...)` with another folder.",
    ),
    (
        "data-changed",
        "The data, its seed or its order differs from the checkpoint's.",
        "The evidence shows the old and the new value.",
        "Restore the data, or use `Data(..., start_sample=...)` to change it on purpose.",
    ),
    (
        "data-empty",
        "The dataset has no samples, or yielded them only once.",
        "Check where it is read from, and what is filtered out.",
        "Use data that can be read repeatedly.",
    ),
    (
        "data-not-a-dataset",
        "The data supports neither indexing nor iteration.",
        "The object's type.",
        "Pass an object with __len__ and __getitem__, or with __iter__.",
    ),
    (
        "data-replayed",
        "A stream that cannot resume at its position was replayed up to it.",
        "The finding gives the seconds it took.",
        "Implement state_dict and load_state_dict on the stream.",
    ),
    (
        "data-smaller-than-batch",
        "An epoch has fewer samples than a step needs.",
        "Both numbers, in the finding.",
        "Use a smaller batch, or more data.",
    ),
    (
        "data-state-not-bit-exact",
        "A stream's own state does not restore its position, as with a shuffle buffer.",
        "The stream's documentation.",
        "Nothing: it was replayed from the epoch's beginning.",
    ),
    (
        "data-unreadable",
        "A data file is missing, cut short, or not the format its name implies; or a row has no text.",
        "The file and line in the finding.",
        "Fetch the file again, or name the column.",
    ),
    (
        "data-worker-lost",
        "A data-loading worker process was killed.",
        "The kernel's log: most often memory. SIGBUS: `df -h /dev/shm` in the container.",
        "Fewer workers, or more memory; for SIGBUS a larger /dev/shm.",
    ),
    (
        "checkpoint-not-bit-exact",
        "Something other than the optimizer changed weights during the copy.",
        "What runs between two steps: hooks, averages, pruning.",
        "Nothing: from then on holdfast finishes each copy before the loop continues.",
    ),
    (
        "checkpoint-tiers-unsupported",
        "Lightning saves its own checkpoints to one folder, and the job names two tiers.",
        "`checkpoint` in the job.",
        "Use a folder that every node reaches, and no `local`.",
    ),
    (
        "checkpoint-local-missing",
        "Checkpoints go to a URL, and no folder on the node is set to save them in first.",
        "`printenv | grep HOLDFAST_CHECKPOINT`.",
        "Set HOLDFAST_CHECKPOINT_LOCAL to a folder on the node's own disk.",
    ),
    (
        "checkpoint-upload-failed",
        "A checkpoint is on the nodes' disks and could not be uploaded to the store.",
        "The evidence: the store's error.",
        "Fix the store; holdfast uploads a later checkpoint when it is due.",
    ),
    (
        "checkpoint-store-unknown",
        "No installed package supports this kind of store.",
        "`pip list` in the ranks' environment.",
        "Install the package that fsspec names, such as s3fs.",
    ),
    (
        "checkpoint-store-unreachable",
        "The checkpoint store does not answer, so holdfast cannot tell which step training reached.",
        "The address, the credentials, the network of the nodes.",
        "Fix it and start again; nothing was changed.",
    ),
    (
        "checkpoints-in-use",
        "Another live run saves its checkpoints in the same folder.",
        "`holdfast ps`; `writer-0.json` in the folder names it.",
        "Use another checkpoint.path, or end that run.",
    ),
    (
        "environment-invalid-number",
        "A variable that holdfast reads in a rank is not a number.",
        "`printenv`.",
        "Unset it, or fix it.",
    ),
    (
        "environment-invalid-auto",
        "HOLDFAST_CHECKPOINT_EVERY accepts only `auto`, and has another value.",
        "`printenv`.",
        "HOLDFAST_CHECKPOINT_EVERY_STEPS takes a number of steps, HOLDFAST_CHECKPOINT_EVERY_S one of seconds.",
    ),
    (
        "environment-invalid-outer-sync",
        "HOLDFAST_OUTER_SYNC, which sets how replicas synchronise, is not a method with a number of steps.",
        "`printenv`.",
        "Unset it, and write `recovery.outer_sync` in the job.",
    ),
    (
        "global-batch-changed",
        "The number of samples per step differs from before the restart.",
        "Batch and world size then and now.",
        "Check the learning rate; training still takes each sample once.",
    ),
    (
        "hyperparameters-changed",
        "The program sets values of its optimizer or schedule that differ from the checkpoint's.",
        "The evidence: each was -> is; the program's value applies.",
        "Nothing, if intended; else restore them, and start it again.",
    ),
    (
        "loader-resume-not-bit-exact",
        "Lightning's loader cannot report which samples of an epoch were used.",
        "The evidence names the loader.",
        "Use torchdata's StatefulDataLoader.",
    ),
    (
        "no-valid-checkpoint",
        "Checkpoints exist, and every one of them is damaged.",
        "The storage; the evidence describes each file's damage.",
        "Fix the storage; the next start begins at step 0.",
    ),
    (
        "checkpoints-lost-with-pod",
        "On a cluster without a volume each pod keeps checkpoints in its own folder, which is lost with the pod.",
        "`volume` in the target, `checkpoint.path` in the job; `kubectl get events` says why the pod was replaced.",
        "Set `volume: {claim: NAME}` in the target, or a URL as `checkpoint.path`.",
    ),
    (
        "optimizer-changed",
        "The optimizer or its parameter groups differ from the checkpoint's; the checkpoint is untouched.",
        "The evidence shows both.",
        "Restore the optimizer, or use another checkpoint.path and load only the weights.",
    ),
    (
        "optimizer-closure",
        "With recovery.replicas, an optimizer step received a closure: it would compute gradients that the "
        "replicas have not averaged.",
        "The loop's call of optimizer.step.",
        "Call backward() before, and step() without a closure; LBFGS and similar optimizers need a job without "
        "recovery.replicas.",
    ),
    (
        "optimizer-step-bypassed",
        "With recovery.replicas, the program called an optimizer.step reference from before the Session was made.",
        "Where the script calls torch.compile(optimizer.step), or keeps optimizer.step.",
        "Make the Session first, and compile or keep optimizer.step after it.",
    ),
    (
        "process-group-missing",
        "A Session of several ranks was made before torch.distributed.init_process_group.",
        "The script's order.",
        "Initialise the process group first.",
    ),
    (
        "session-state-invalid",
        "Session(state=...) was given an object without state_dict and load_state_dict, or a name that cannot be used.",
        "The evidence.",
        'Give objects that have both, by name: Session(state={"scaler": scaler}).',
    ),
    (
        "replicas-diverged",
        "Replicas that must be equal hold different weights or optimizer states: a device computed or stored a wrong "
        "bit, or the program changes weights differently in each replica.",
        "The evidence: the digests of each replica, by rank. Whether it comes again at the same step, or on one rank.",
        "Nothing at the first time: the minority has received the majority's state or, without a majority, the run "
        "resumes from the last checkpoint that all agreed on. If one rank repeats it, take its node out of use; if it "
        "comes at the same step, look for updates outside optimizer.step.",
    ),
    (
        "backward-interrupted",
        "With recovery.replicas, errors that the program caught ended backward passes, whose steps were discarded.",
        "The rank's log has a line for each; look for what catches errors around backward().",
        "Make the batch smaller if memory ran out; let a module of FSDP2 occur once in a forward pass.",
    ),
    (
        "replicas-gradients-overwritten",
        "With recovery.replicas, a wrapper around the session's model wrote gradients after they had been averaged.",
        "Compare the model passed to Session(model=...) with the one the loop calls forward on.",
        "Pass the Session the outermost wrapper, such as the DistributedDataParallel.",
    ),
    (
        "replicas-wrapper-unsupported",
        "With recovery.replicas, the model is in a wrapper that reduces gradients in its own way, such as legacy FSDP.",
        "The wrapper that the finding names.",
        "Use fully_shard (FSDP2) or torch's DDP inside each replica, or no recovery.replicas.",
    ),
    (
        "replicas-nccl-no-abort",
        "With recovery.replicas on GPUs, this torch cannot abort an NCCL communicator: a lost replica would block the "
        "others for ever.",
        "The evidence; `torch.cuda.nccl.version()`.",
        'Install a torch with NCCL 2.26 or later, or use init_process_group("gloo").',
    ),
    (
        "quorum-service-unreachable",
        "A replica got no answer from the quorum service, which decides the replicas that take part in a step.",
        "The evidence; whether the node reaches the address.",
        "Check that the service runs, and let the node reach it.",
    ),
    (
        "ranks-diverged",
        "Ranks that DDP keeps equal hold or compute different numbers. A device computed or stored a wrong bit; or the "
        "script changes weights outside optimizer.step.",
        "The evidence: the digest of each rank. Where the script sets weights, and its use of no_sync.",
        "Nothing at the first time: the nodes are checked, and the run resumes from the last checkpoint that all ranks "
        "agreed on. If it comes at the same step: set weights before DistributedDataParallel is made, reduce the last "
        "micro-batch, and change weights in optimizer.step only.",
    ),
    (
        "silent-corruption",
        "A rank holds other weights or optimizer state, or computes other gradients from the same samples, than the "
        "ranks that must be equal to it: a device or its memory changed a bit, and reported no error.",
        "The evidence: the digests, or which rank repeated whose pass.",
        "The node is replaced, and the run resumes from the last checkpoint that all ranks agreed on. Test the node's "
        "devices and memory before it is used again.",
    ),
    (
        "step-not-repeatable",
        "A forward and backward pass gives other gradients when it is repeated, or cannot be repeated on another rank, "
        "so wrong gradients are not looked for.",
        "The evidence: why.",
        "`torch.use_deterministic_algorithms(True)`; wrap the whole model in DistributedDataParallel, and give it to "
        "the Session.",
    ),
    (
        "ranks-found-different-checkpoints",
        "Ranks found different newest checkpoints.",
        "The evidence; what `checkpoint.path` is on each node.",
        "Use a folder that all nodes share.",
    ),
    (
        "replica-connect-failed",
        "A replica found the others, and could not connect to them or receive the training state from one.",
        "The evidence; whether one of them was lost at that moment; connections from node to node on any port.",
        "Nothing if one was lost. Else open the ports between the job's nodes, including the ranks' own ports.",
    ),
    (
        "replica-state-unsendable",
        "A replica that was behind could not receive the training state: the rank that has it cannot pickle it.",
        "The evidence: the error, and the address of the rank that has the state.",
        "Keep functions, locks and open files out of the state_dict of the model and the optimizer. The other "
        "replicas continue meanwhile.",
    ),
    (
        "replica-state-unreadable",
        "A replica that was behind received the training state and could not load it.",
        "The evidence; the versions of Python, torch and the program's packages on its node and on the others.",
        "Install the same versions on all nodes, and keep objects that only one process can unpickle out of the "
        "state_dict of the model and the optimizer. The other replicas continue meanwhile.",
    ),
    (
        "step-not-committed",
        "The loop body did not call session.commit exactly once.",
        "The script's loop.",
        "Call commit once in every step.",
    ),
    (
        "text-too-short",
        "The text is shorter than one sample.",
        "The text's size.",
        "Use more text, or shorter samples.",
    ),
    (
        "trainer-resume-not-bit-exact",
        "Arguments of the Trainer prevent a bit-exact resume.",
        "The evidence names each argument.",
        "Remove them, unless intended.",
    ),
    (
        "trainer-replicas-unsupported",
        "The job sets several replicas, and the program uses a Trainer, which would train each replica alone.",
        "`recovery.replicas` in the job.",
        "Remove it, or train in a loop with a Session.",
    ),
    (
        "trainer-replay-unsupported",
        "A replay started a program with a Trainer, whose loop has its own checkpoints and steps.",
        "`replay-*.log` in the node's folder.",
        "Nothing: the run restarts. Only the steps of a Session can be repeated.",
    ),
    (
        "torchtitan-unsupported",
        "A setting of TorchTitan does not work with holdfast's trainer for it.",
        "The setting in `where`, and `docs/torchtitan.md`.",
        "Change the setting, or use TorchTitan's own `--module`: holdfast still launches and restarts the job.",
    ),
    (
        "torchtitan-trainer-unsupported",
        "A configuration belongs to a model whose trainer is a subclass of TorchTitan's.",
        "The configuration in `where`.",
        "Use TorchTitan's own `--module`: holdfast still launches and restarts the job.",
    ),
    (
        "trainer-not-distributed",
        "The Trainer trains alone on each rank.",
        "WORLD_SIZE, and the world size that the Trainer reports.",
        "On CPUs use_cpu=True and ddp_backend='gloo'.",
    ),
    (
        "waiting-for-replicas",
        "A replica waits for others before its next step: too few are present, or one is slow to join.",
        "`holdfast status`; the state of the others.",
        "Nothing: it continues by itself once enough of them have joined.",
    ),
    (
        "replica-quorum-lost",
        "Fewer replicas are running than `recovery.min_replicas`, so no step is committed.",
        "`holdfast status`.",
        "Nothing: holdfast is restarting the lost replicas.",
    ),
    (
        "replica-quorum-regained",
        "`recovery.min_replicas` replicas are running again.",
        "`holdfast status`.",
        "Nothing: replicas commit steps again.",
    ),
    (
        "world-size-changed",
        "Another number of ranks took the checkpoint, and what the evidence names does not resume bit-exactly.",
        "WORLD_SIZE then and now.",
        "Nothing, if intended; a Session that deals the samples (`batches`, `micro_batches`) resumes exactly.",
    ),
)
