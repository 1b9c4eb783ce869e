"""Explains the findings that controller and agents raise: failures of ranks and nodes, disks, limits, drills.

One row per code: its cause, how to confirm it, what to do. A long file, because it is one table.
"""

from __future__ import annotations

_DIAGNOSE = "`holdfast diagnose RUN`."
_XID = "The line in the evidence; `dmesg -T | grep -i xid` on that node, then `holdfast explain XID-…`."
CHECK_DISK = "`df -h`, `df -i`, `mount` and `dmesg` on that machine."

ROWS: tuple[tuple[str, str, str, str], ...] = (
    # How an attempt ends
    (
        "rank-crashed",
        "A rank's program ended with its own error.",
        f"{_DIAGNOSE} It shows the rank that failed first and its last error.",
        "Fix that error; the others only lost their peer.",
    ),
    (
        "rank-terminated-externally",
        "A process outside holdfast sent a rank SIGTERM; all ranks saved after the same step, and exited with code 75.",
        "The rank's own log: `stopped after step ..., as requested`.",
        "Nothing: training resumes from that checkpoint. If it happens again, find the sender.",
    ),
    (
        "rank-killed",
        "A signal that holdfast did not send ended a rank.",
        f"{_DIAGNOSE} Then `holdfast explain` with the signal's name.",
        "Find out who sent it: the kernel, the scheduler, a person, or the program itself.",
    ),
    (
        "notification-failed",
        "A receiver of the target's `notify` did not take a message in three attempts. It is reported once.",
        "The error in the evidence. For a command, run it with the same input.",
        "Correct the receiver or its secret; on Kubernetes allow the controller to reach it (`egress`).",
    ),
    (
        "rank-out-of-memory",
        "The kernel killed a rank because its node or cgroup was out of memory; holdfast found the kernel's record.",
        "`dmesg -T | grep -i 'killed process'`, memory.events of the cgroup.",
        "Fewer DataLoader workers, less pinned memory, sharded loading; or more memory.",
    ),
    (
        "rank-hung",
        "A rank completed no step within recovery.step_timeout_s.",
        f"{_DIAGNOSE} The stacks show where each rank waits: find the rank that waits elsewhere.",
        "Fix what that rank waits for: data, a lock, a collective that the others do not enter.",
    ),
    (
        "node-lost",
        "A node, or the agent on it, has been gone or unreachable for longer than recovery.node_grace_s.",
        "The status from the target in the evidence; the agent's log; the machine itself.",
        "Nothing while holdfast replaces it; if one machine fails repeatedly, take it out of use.",
    ),
    (
        "node-preempted",
        "A node's agent got SIGTERM: the target takes the node away, and its ranks had recovery.stop_grace_s to save.",
        "The target's events: evictions, preemptions, spot notices, maintenance.",
        "Nothing: all ranks end, holdfast replaces the node, and the run resumes from what they saved. When the "
        "notice is shorter than recovery.stop_grace_s, lower that.",
    ),
    (
        "node-never-joined",
        "A node was created and its agent never connected to the controller.",
        "nodes/nodeN.*/agent.log in the run's folder; whether it reaches the controller's address and port.",
        "Open the path from node to controller; fix the error in the agent's log.",
    ),
    # Devices
    (
        "gpu-failed",
        "A rank lost its GPU: it is off the bus, is reported as lost, or has no spare memory rows left.",
        _XID,
        "Nothing for the run: it replaces the node. Power-cycle the machine; if the GPU fails again, replace the GPU.",
    ),
    (
        "gpu-memory-failed",
        "A GPU's memory returned data that ECC could not correct.",
        f"`nvidia-smi -q -d ECC`. {_XID}",
        "Nothing for the run: it replaces the node. Reset the GPU; if it fails again, replace the GPU.",
    ),
    (
        "nvlink-failed",
        "A link between GPUs failed, or an NVSwitch reported a fatal error.",
        f"`nvidia-smi nvlink -e`. {_XID}",
        "Nothing for the run: it replaces the node. Reset its GPUs or reboot it; the same link again: replace it.",
    ),
    (
        "gpu-needs-reset",
        "A GPU does not work until it is reset: it stopped processing, or its system processor does not answer.",
        _XID,
        "Nothing for the run: it replaces the node. `nvidia-smi --gpu-reset -i N`, or reboot the machine.",
    ),
    (
        "gpu-not-ready",
        "CUDA reports that the node's NVSwitches are not set up: its Fabric Manager is not running or does not match.",
        "`systemctl status nvidia-fabricmanager`; `nvidia-smi -q | grep -A2 Fabric`.",
        "Nothing for the run: it replaces the node. Start nvidia-fabricmanager, in the driver's version.",
    ),
    (
        "nic-failed",
        "A network adapter of the node failed, or its firmware rejected a command.",
        "`dmesg -T | grep mlx5`; `ibstat` on that node.",
        "Nothing for the run: it replaces the node. Power-cycle the machine, then check firmware and cooling.",
    ),
    (
        "nic-link-down",
        "A network adapter lost its link or its address, and the rank's communication failed.",
        "`ethtool -S`, `ibstat` and `dmesg -T | grep -i link` on that node.",
        "Nothing for the run: the first time its ranks restart, the second time within recovery.suspect_window_s it "
        "replaces the node. Check cable, transceiver and switch port.",
    ),
    (
        "gpu-memory-error-contained",
        "A GPU's memory failed beyond correction, but the driver contained it: only this program is affected.",
        _XID,
        "Nothing for the run: the first time its ranks restart, the second time within recovery.suspect_window_s it "
        "replaces the node. Reset the GPU at the next pause.",
    ),
    (
        "gpu-error-unclear",
        "A CUDA error that a kernel, the driver or a failing GPU may cause, such as an unspecified launch failure.",
        f"{_XID} CUDA_LAUNCH_BLOCKING=1 shows the call.",
        "With a hardware Xid have the GPU replaced; without one, on several nodes: fix the kernel. A second fault of "
        "the node within recovery.suspect_window_s replaces it.",
    ),
    (
        "nccl-system-call-failed",
        "A call of NCCL to the operating system or the network failed: a link, a limit, a full /dev/shm.",
        "NCCL_DEBUG=WARN: the first `NCCL WARN` line of that rank names the call.",
        "Fix what that line names. A second fault of the node within recovery.suspect_window_s replaces it.",
    ),
    (
        "nccl-peer-gone",
        "NCCL reports that a peer closed its connection, and no rank or node reported another failure.",
        "Find the rank whose log ends first: `holdfast diagnose RUN`.",
        "Fix that rank's error; the rank in the finding only lost its peer.",
    ),
    (
        "machine-not-avoided",
        "A node's devices failed, and its replacement runs on the same machine: a local run has no other.",
        "`holdfast events`: the failure before it.",
        "Repair the device, or run the job on a target with other machines.",
    ),
    (
        "machine-cordoned",
        "A device failed on this machine of the cluster, and the controller's account may cordon machines.",
        "`kubectl get node MACHINE`: SchedulingDisabled, with the reason in the annotation `holdfast/quarantine`. On "
        "Slurm `sinfo --list-reasons`: drained, with the reason.",
        "Have the machine repaired, then `holdfast nodes --release MACHINE --on TARGET`, which uncordons it too.",
    ),
    (
        "machine-quarantined",
        "A run found this machine to be at fault, so later runs on the target avoid it for a day or, if a device "
        "surely failed, a week; twice as long each further time.",
        "`holdfast nodes --on TARGET`: why, which run found it, and until when.",
        "Have the machine repaired, then `holdfast nodes --release MACHINE --on TARGET`.",
    ),
    (
        "machines-quarantined",
        "Earlier runs found machines of this target to be at fault, so this run is not placed on them.",
        "`holdfast nodes --on TARGET`.",
        "Release those that are repaired: `holdfast nodes --release MACHINE --on TARGET`.",
    ),
    (
        "quarantine-full",
        "A tenth of the target's machines is quarantined already, so one more is not: a wrong rule must not empty a "
        "cluster.",
        "`holdfast nodes --on TARGET`: what the machines have in common.",
        "Release those that are repaired. If all failed alike, look at what they share: switch, driver, image.",
    ),
    (
        "quarantine-doubtful",
        "One job had the same failure on four machines within an hour. Its program or a check is more likely at fault "
        "than four machines, so the fourth is not quarantined.",
        "Run another job on these machines: `holdfast check --full`.",
        "If they are healthy, release those that are quarantined and fix the program.",
    ),
    (
        "quarantine-unreadable",
        "The stored list of quarantined machines is damaged, or a newer holdfast wrote it. It counts as empty.",
        "The file or ConfigMap in the finding, and the copy of the old content next to it.",
        "Correct the old content and put it back, or quarantine anew as failures come.",
    ),
    (
        "machine-not-quarantined",
        "The machine to be released is not quarantined: its time is over, or its name is another.",
        "The evidence: the machines that are.",
        "`holdfast nodes --on TARGET` lists all of them.",
    ),
    (
        "machine-still-cordoned",
        "A run cordoned this machine. It is released, and this user may not uncordon it.",
        "`kubectl get node MACHINE`: SchedulingDisabled.",
        "Have an administrator run `kubectl uncordon MACHINE`.",
    ),
    (
        "machine-not-remembered",
        "The run avoids a machine that failed, but its account may not write the ConfigMap of quarantined machines.",
        "`kubectl auth can-i patch configmaps/holdfast-quarantine --as=system:serviceaccount:NAMESPACE:ACCOUNT`.",
        "Allow that in the account's Role, or cordon the machine: `kubectl cordon MACHINE`.",
    ),
    (
        "machine-not-cordoned",
        "A device failed on this machine of the cluster. The run uses it no more, but may not cordon it for others.",
        "The finding that replaced the node; `dmesg` on that machine.",
        "`kubectl cordon MACHINE`, on Slurm `scontrol update nodename=MACHINE state=drain`, and have it repaired.",
    ),
    (
        "standby-not-ready",
        "A standby failed its preflight, so it replaces no lost node.",
        "The evidence: the folder, the program or the code that is missing on that node.",
        "Fix the node and end its agent, which recreates the standby; the run continues without it.",
    ),
    (
        "program-not-started",
        "The operating system could not start the command.",
        "`command -v PROGRAM` on that node; the evidence.",
        "Fix the command or the working directory.",
    ),
    (
        "code-not-delivered",
        "A node could not fetch the job's code from the controller.",
        "The evidence; free space on the node's disk.",
        "Free some space, or open the path to the controller.",
    ),
    (
        "rendezvous-port-in-use",
        "Another process listened on the ranks' rendezvous port.",
        "`ss -ltnp` on that node.",
        "Nothing: the next attempt uses a fresh port.",
    ),
    (
        "spawn-resources-exhausted",
        "The node had no processes, open files or memory left to start the ranks.",
        "`ulimit -a`, pids.max of the cgroup, `free -h` on that node.",
        "Raise the limit, or end other programs there.",
    ),
    (
        "failure-cause-unknown",
        "The attempt ended, and the log that should show why lost a line.",
        "`holdfast events`; the disk's health.",
        "Check the disk.",
    ),
    # Disks and limits
    ("disk-full", "No space, no inodes or no quota is left.", CHECK_DISK, "Free some, or use another file system."),
    (
        "read-only-file-system",
        "The file system is read-only: it was mounted so, or the kernel remounted it after errors.",
        CHECK_DISK + " dmesg shows errors if the kernel remounted it.",
        "If mounted so: mount it with rw, or write elsewhere. If remounted: check and repair the disk first.",
    ),
    (
        "disk-error",
        "The disk, or the server behind it, failed to read or write.",
        CHECK_DISK,
        "Replace the disk; for a network file system, check its server and the path to it.",
    ),
    ("disk-space-recovered", "Disk space is available again; what waited for it resumes.", CHECK_DISK, "Nothing."),
    ("too-many-open-files", "A limit on open files was reached.", "`ls /proc/PID/fd`, `ulimit -n`.", "Raise it."),
    ("too-many-processes", "A limit on processes was reached.", "`ulimit -u`, pids.max of the cgroup.", "Raise it."),
    ("no-memory", "The kernel refused memory.", "`free -h`, `ulimit -v`.", "Request less memory."),
    (
        "fabric-link-down",
        "The agent reads the state and the counters of the node's RDMA ports every 5 s. A port is not active any more, "
        "or its link_downed has grown: NCCL repeated what was under way, or ended with an error.",
        "`cat /sys/class/infiniband/DEVICE/ports/1/counters/link_downed` grows; `dmesg` names the port.",
        "Reseat or replace the cable or transceiver; try another switch port. The third time within 300 s the run "
        "replaces the node.",
    ),
    (
        "fabric-link-errors",
        "The symbol errors, receive errors or recoveries of a port's link grew by 20 or more in a minute: the cable, "
        "the transceiver or a port at one of its ends is bad.",
        "`ibqueryerrors -r`, or the files in /sys/class/infiniband/DEVICE/ports/1/counters, twice.",
        "Clean, reseat or replace the cable or transceiver.",
    ),
    (
        "fabric-nic-slow",
        "For 30 s a port carried less than 60 % of what it carried earlier while busy, and its siblings of the same "
        "kind on the node kept theirs. Its other counters are the evidence of the reason.",
        "Compare the counters of the ports in /sys/class/infiniband; `iblinkinfo` shows the width and speed of links.",
        "symbol_error or link_error_recovery: replace the cable. port_xmit_wait, rp_cnp_handled, pauses: congestion in "
        "the network. None of them: see whether the job itself has stopped using this port.",
    ),
    (
        "gpu-throttled",
        "For 15 s a GPU has lowered its clocks because it is too hot, or because its power supply asks for it.",
        "`nvidia-smi -q -d PERFORMANCE,TEMPERATURE` on that node, while the job runs.",
        "Check cooling, fans and power supplies of the machine. All ranks wait for the slowest GPU.",
    ),
    (
        "gpu-repair-pending",
        "A GPU found bad rows or pages in its memory, and takes them out of use at its next reset.",
        "`nvidia-smi -q -d ROW_REMAPPER,PAGE_RETIREMENT`.",
        "Reset the GPU between two jobs: `nvidia-smi --gpu-reset -i N`.",
    ),
    (
        "nvlink-errors",
        "The links between GPUs recover from errors, or repeat more than 100 packets a second.",
        "`nvidia-smi nvlink -e`, twice.",
        "Reset the GPUs of the node at the next pause; the same link again: have it replaced.",
    ),
    (
        "gpu-pcie-errors",
        "A GPU repeats PCIe packets: twice in a row at least 8 in 5 s. NVIDIA tolerates 8 a minute.",
        "`nvidia-smi -q | grep -i replay`, twice; `dmesg | grep -i aer`.",
        "Reseat the GPU or its riser.",
    ),
    (
        "host-memory-failed",
        "The kernel reports that the node's memory returned data that ECC could not correct.",
        "`dmesg -T | grep -i -e edac -e 'memory failure'`; `edac-util -v`.",
        "Take the node out of use, and replace the memory module that the line names.",
    ),
    (
        "host-machine-check",
        "A processor of the node reported a machine check.",
        "`mcelog --client` or `ras-mc-ctl --errors` decodes it.",
        "If it comes again: take the node out of use.",
    ),
    (
        "host-disk-failed",
        "A disk of the node stopped answering, so that the kernel resets or removes it.",
        "`dmesg -T | grep -i nvme`; `nvme smart-log /dev/nvme0`.",
        "Take the node out of use, and replace the disk.",
    ),
    (
        "disk-slow",
        "For 30 s the requests to a disk took half a second or more on average.",
        "`iostat -x 5` (await) on that node; `iotop` names the processes.",
        "Put data and checkpoints on another disk, or write less often; replace a disk that fails.",
    ),
    (
        "cpu-limit-reached",
        "For 30 s the CPU limit of the node's cgroup stopped its processes in a tenth of its periods or more.",
        "nr_periods and nr_throttled in cpu.stat of the cgroup.",
        "Raise the limit (`resources.cpu`, or the pod's), or use fewer DataLoader workers and threads.",
    ),
    (
        "cpu-contended",
        "For 30 s no process of the node's cgroup got a processor in a fifth of the time, though one wanted it.",
        "cpu.pressure of the cgroup (`full`); `top` on the machine.",
        "Move the other programs of the machine, or reserve whole processors for the job.",
    ),
    (
        "cpu-throttled",
        "For 30 s a processor lowered its clock because it was too hot.",
        "/sys/devices/system/cpu/cpu0/thermal_throttle/package_throttle_count grows.",
        "Check cooling and fans of the machine.",
    ),
    (
        "memory-pressure",
        "Nearly all memory of a node or cgroup is in use; the kernel will kill a rank next.",
        "`free -h`, memory.current of the cgroup.",
        "Fewer DataLoader workers, a smaller cache.",
    ),
    # Watching
    (
        "gpu-in-use",
        "A process outside the job holds memory on one of the job's GPUs.",
        "`nvidia-smi`; `ps -o user,args -p PID` shows its user.",
        "If it is left over from your job: end it. If it is another user's: ask them, or use other GPUs.",
    ),
    (
        "ignored-sigterm",
        "A rank did not end when holdfast stopped it, and was killed.",
        "Its handler for SIGTERM; recovery.stop_grace_s.",
        "Make the program end, or give it more time.",
    ),
    (
        "orphan-processes",
        "The ranks of an attempt ended and left processes behind, which holdfast killed.",
        "The finding names them and the ports that they listened on.",
        "Make the program wait for its child processes, and start no daemon.",
    ),
    (
        "no-output",
        "Ranks are running, and none has written a line, passed a step or taken a checkpoint for minutes.",
        "`holdfast diagnose RUN` dumps the stacks of all ranks and shows where each waits.",
        "Wait if the program is quiet by design; else cancel it, and make all ranks enter the same collectives.",
    ),
    (
        "rank-exit-blocked",
        "A rank's program has ended, and non-daemon threads keep its process alive.",
        "The finding names the threads and the file with their stacks; `holdfast logs` shows the rank's last lines.",
        "End the thread, or start it with `daemon=True`; recovery.exit_timeout_s gives it more time.",
    ),
    (
        "no-rendezvous",
        "Several ranks ended with code 0, and the first never had a rendezvous connection.",
        "Whether each rank logs a world size of 1; the script's `init_process_group` or `Trainer(...)`.",
        "Call `init_process_group()`, or set `num_nodes` and `devices` as in the job. Nothing if each rank "
        "works by itself.",
    ),
    (
        "cold-start",
        "A rank started without prewarmed imports.",
        "The finding says why it could not be forked from the zygote, which has the imports done.",
        "Nothing need be done; see docs/prewarmed-restarts.md. `recovery.prewarm: false` turns prewarming off.",
    ),
    ("log-truncated", "A rank's log reached its size limit.", "`logs.max_bytes`.", "Write less, or raise the limit."),
    ("log-retention-off", "A rank's log cannot be truncated from the front here.", "The file system.", "Write less."),
    (
        "clock-jumped",
        "The wall clock of a machine was set during a run.",
        "`timedatectl`, `chronyc tracking` on that machine.",
        "Synchronise clocks by NTP; the run's own times use a monotonic clock.",
    ),
    (
        "scale-up-started",
        "Nodes that were missing are available again, and join after a checkpoint.",
        "`holdfast status`.",
        "Nothing.",
    ),
    # The controller
    (
        "controller-dead",
        "The run's controller and its supervisor have died.",
        "The end of controller.log.",
        "`holdfast attach RUN` starts it again.",
    ),
    ("controller-timeout", "The controller is busy, stopped or starting.", "`holdfast status`.", "Try again."),
    (
        "run-on-another-host",
        "The run's processes are on another machine, or belong to another user: its folder is shared.",
        "The evidence names the machine, or says that another process holds the run's lock.",
        "Run `holdfast cancel --force RUN` there.",
    ),
    (
        "controller-port-in-use",
        "Another process took the controller's port while it was down.",
        "`ss -ltnp`.",
        "Nothing: the controller uses another port.",
    ),
    (
        "start-failed",
        "The supervisor of a run did not start.",
        "The end of controller.log.",
        "Fix the error that it shows.",
    ),
    ("request-refused", "The controller did not accept a request.", "The evidence.", "Report it."),
    ("event-log-blocked", "The run's log cannot be written, so the run waits.", CHECK_DISK, "Free some space."),
    (
        "event-log-partially-corrupt",
        "Lines of the event log are damaged; nothing depends on them.",
        CHECK_DISK,
        "Check the disk.",
    ),
    (
        "event-log-restored",
        "The controller's machine was lost, and its event log with it; a node had a replica of the log.",
        "`holdfast events`.",
        "Nothing; with a volume in the target the log survives.",
    ),
    (
        "event-log-lost",
        "The controller's machine was lost, and the event log and all of its replicas with it.",
        "`volume` of the target.",
        "Name a volume in the target.",
    ),
    (
        "event-log-repaired",
        "Something other than the run's controller changed the event log: cut it, removed it, or wrote into it.",
        "The evidence says how much; `fuser -v` and `lsof` of the log name the processes that have it open.",
        "Nothing: the controller has restored it. Keep other programs out of the run's folder.",
    ),
    ("event-log-corrupt", "The event log is corrupt in a part that the run needs.", CHECK_DISK, "Start the job again."),
    ("internal", "An internal error of holdfast.", "The file that the finding names.", "Report it with that file."),
    (
        "run-file-corrupt",
        "A file in a run's folder is not what holdfast wrote: changed, cut short, or replaced.",
        "`ls -l` of it; the evidence describes what was found.",
        "Restore it, or end the run: `holdfast cancel --force RUN`.",
    ),
    (
        "controller-failing",
        "Controllers of the run end as soon as they start; its ranks continue meanwhile.",
        "The last lines of the run's controller.log.",
        "Fix the error there, or `holdfast cancel --force RUN`.",
    ),
    (
        "protocol-mismatch",
        "The protocol versions of a node's agent and of the controller are two or more apart: one of their images "
        "was replaced.",
        "`holdfast events RUN`: the version of each controller.",
        "Set the image back to the release before ([upgrades](../../kubernetes.md#upgrades)).",
    ),
    (
        "processes-not-exiting",
        "Processes of a run were killed and do not end.",
        "`ps` for state D.",
        "Check what the kernel holds them for, and cancel again.",
    ),
    (
        "orchestrator-lost",
        "Monarch's client process has ended or hung, and with it the processes that started the nodes' agents. The "
        "nodes are started again, and ranks resume from the last checkpoint.",
        "The last lines of `nodes/monarch/client.log` in the run's folder, which are in the evidence.",
        "Nothing if it happens once. If it repeats, leave `orchestrator` out, and report what the log says to Monarch.",
    ),
    (
        "agent-not-placed",
        "Monarch did not start the process of a node's agent, or reported an error instead; it is tried again.",
        "Monarch's own words in the finding, and `nodes/monarch/client.log` in the run's folder.",
        "Fix what they say. If it does not succeed, leave `orchestrator` out.",
    ),
    (
        "command-failed",
        "The controller could not carry out a command, such as creating a node; the run continues without it "
        "meanwhile.",
        "The evidence, and the traceback in the run's controller.log.",
        "Fix the cause in the evidence. holdfast replaces a node that does not come up, three times at most.",
    ),
    # Drills and nodes with their own network
    ("fault-unavailable", "This target does not support that drill.", "The evidence.", "Follow the finding."),
    ("netns-command-failed", "A command that sets up a node's network failed.", "The evidence.", "Follow the finding."),
    ("netns-exists", "A network of that name is left over from an earlier run.", "`ip netns`.", "Remove it."),
    ("netns-full", "There are more nodes than a network has addresses.", "`nodes`.", "Use fewer nodes."),
    ("netns-no-free-subnet", "This machine's routes cover every private range.", "`ip route`.", "Free a /24."),
    ("netns-not-found", "The network or node no longer exists.", "`ip netns`.", "Start the run again."),
    (
        "netns-processes-not-exiting",
        "Processes of a node do not end.",
        "`ps` for state D.",
        "Check what they wait for.",
    ),
    ("netns-unavailable", "The kernel forbids namespaces here.", "`unshare -rn true`.", "`isolation: process`."),
    # The fabric while it runs
    (
        "wrong-interface",
        "Ranks exchange data over a network interface that the run does not name for data, such as a slow one for "
        "management. The kernel's tables of both nodes' sockets show it.",
        "`holdfast events` has each node's connections; `ss -tnp` on the node; `getent ahosts $(hostname)`.",
        "Set the variable that the finding names in `fabric.env`, or correct the host name's address.",
    ),
    (
        "link-slowed",
        "A connection between two nodes has had less than 60 % of its first rate for some time, while it had data to "
        "send.",
        "`ip -s link`, `ethtool -S`, `tc -s qdisc` and `ss -tni` on both nodes; `holdfast check` on the pair.",
        "Check cables, switch ports and other traffic. If one node has all slow links, take it out of use.",
    ),
)
