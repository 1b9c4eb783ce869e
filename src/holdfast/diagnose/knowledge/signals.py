"""Explains signals and exit statuses: holdfast's own, the shell's, torchrun's, Slurm's and Kubernetes'."""

from __future__ import annotations

import signal
from collections.abc import Iterator

from msgspec import Struct

from holdfast.diagnose.knowledge.explanation import Explanation
from holdfast.errors import EXIT_CODE_MEANINGS, ExitCode

SIGNALS_SOURCE = "Linux, signal(7): https://man7.org/linux/man-pages/man7/signal.7.html"
SHELL_SOURCE = "POSIX, Shell Command Language, exit status: 128 + N for a command that signal N ended"
OWN_SOURCE = "holdfast, exit codes"


class Signal(Struct, frozen=True):
    """One signal, and what it means when it ends a rank."""

    number: signal.Signals
    cause: str
    confirm: str
    remedy: str


_CORE = "The rank's stderr (`Fatal Python error` with PYTHONFAULTHANDLER=1), `coredumpctl`, `dmesg | tail`."

SIGNALS: tuple[Signal, ...] = (
    Signal(
        signal.SIGHUP,
        "The process's terminal or session was closed.",
        "Check whether an ssh session or shell ended then.",
        "Start it detached from the terminal: `holdfast run -d`, sbatch, tmux, setsid. torchrun undoes what "
        "nohup does.",
    ),
    Signal(
        signal.SIGINT,
        "A user pressed Ctrl-C in its terminal, or a launcher (torchrun, srun) forwarded one.",
        "The launcher's log shows it (`Received 2 death signal`); `holdfast status` shows who cancelled its own run.",
        "Nothing, if intended; else start it detached from the terminal: `holdfast run -d`, sbatch, tmux.",
    ),
    Signal(
        signal.SIGILL,
        "The CPU does not support an instruction: a library was built for another CPU.",
        "`dmesg | grep -i 'invalid opcode'`, `lscpu` on both nodes.",
        "Install a build for the oldest CPU among the nodes.",
    ),
    Signal(
        signal.SIGABRT,
        "The program aborted itself: an assertion or an uncaught C++ exception. torch's NCCL watchdog does so "
        "after a collective timed out.",
        "The rank's last lines: `Watchdog caught collective operation timeout`, `terminate called`, `double free`.",
        "After a watchdog: find the rank that did not take part, `holdfast diagnose LOGS`. Else fix the error "
        "in those lines.",
    ),
    Signal(
        signal.SIGBUS,
        "Memory behind a mapping was missing: /dev/shm is full, a mapped file was cut short, or its server is gone.",
        "`df -h /dev/shm` in the container while it runs; DataLoader logs `insufficient shared memory (shm)`.",
        "A larger /dev/shm: an emptyDir with `medium: Memory` mounted there, `--shm-size=16g`, `--ipc=host`; or fewer "
        "DataLoader workers.",
    ),
    Signal(signal.SIGFPE, "An integer was divided by zero, in native code.", _CORE, "Fix the input that caused it."),
    Signal(
        signal.SIGKILL,
        "A SIGKILL, which a process cannot handle: most often the kernel for lack of memory, but also a "
        "launcher after another rank had failed, Kubernetes, Slurm, or a person. By itself it does not prove a "
        "lack of memory.",
        "`dmesg -T | grep -i 'killed process'`; `memory.events` of its cgroup (oom_kill); `kubectl describe pod` "
        "(OOMKilled); `sacct -j JOB -o State,ExitCode`.",
        "Lack of memory: fewer DataLoader workers, less pinned memory, a higher limit. No sign of that: find "
        "the rank that failed first.",
    ),
    Signal(
        signal.SIGSEGV,
        "Native code accessed invalid memory: a bug in an extension, incompatible libraries, or bad memory.",
        _CORE,
        "PYTHONFAULTHANDLER=1 shows the Python line; undo the last upgrade. Always the same node: test its memory.",
    ),
    Signal(
        signal.SIGPIPE,
        "It wrote to a pipe or socket whose reader had closed.",
        "The process that read its output.",
        "Find out why the reader ended.",
    ),
    Signal(
        signal.SIGTERM,
        "Another process requested its end: a launcher after another rank had failed, Slurm at the time limit, "
        "Kubernetes for an eviction or preemption, `holdfast cancel`. Never the first cause.",
        "`kubectl get events`, `sacct -j JOB -o State`, the other ranks' logs.",
        "Look for what happened before it.",
    ),
    Signal(
        signal.SIGUSR1,
        "A warning that the program did not handle, mostly Slurm's before the time limit (`--signal=USR1@300`).",
        "`grep -- --signal` in the job script; `sacct -j JOB -o State,Timelimit,Elapsed`.",
        "Take a checkpoint in a handler of it (signal.signal(signal.SIGUSR1, ...)), or remove `--signal`.",
    ),
    Signal(
        signal.SIGUSR2,
        "A warning that the program did not handle, before preemption or the time limit, as agreed with the scheduler.",
        "`grep -- --signal` in the job script; `sacct -j JOB -o State,Timelimit,Elapsed`.",
        "Take a checkpoint in a handler of it (signal.signal(signal.SIGUSR2, ...)), or remove `--signal`.",
    ),
    Signal(
        signal.SIGXCPU,
        "It used more CPU time than its limit.",
        "`ulimit -t`, /proc/PID/limits.",
        "Raise the limit.",
    ),
    Signal(
        signal.SIGXFSZ,
        "It wrote a file larger than its limit.",
        "`ulimit -f`, /proc/PID/limits.",
        "Raise the limit.",
    ),
    Signal(
        signal.SIGSYS,
        "A seccomp profile forbids a system call.",
        "`dmesg | grep type=1326` (the kernel's audit, with the call's number); Seccomp in /proc/PID/status.",
        "Use a profile that allows it.",
    ),
)


class ExitStatus(Struct, frozen=True):
    """One exit status that is not a signal."""

    number: int
    meaning: str
    confirm: str
    remedy: str
    source: str = SHELL_SOURCE


STATUSES: tuple[ExitStatus, ...] = (
    ExitStatus(
        1,
        "The program failed by itself, as Python does after an exception; torchrun too, however its worker ended.",
        "The last traceback of the rank that ended first.",
        "Fix that error: `holdfast diagnose LOGS` finds the first.",
        "Python, sys.exit; torch.distributed.elastic",
    ),
    ExitStatus(
        124,
        "`timeout` ended it because its time limit was reached.",
        "The job's command, or what starts it: `timeout SECONDS ...`.",
        "Set a longer timeout, or none.",
        "coreutils, timeout(1)",
    ),
    ExitStatus(
        255,
        "A status out of range, -1, or ssh and srun that lost the other side.",
        "Find which program of the chain ended first.",
        "Read the node's own log.",
        "ssh(1), srun(1)",
    ),
)

EXIT_CODES: dict[ExitCode, tuple[str, str]] = {
    ExitCode.OK: ("Nothing to confirm.", "Nothing."),
    ExitCode.USAGE: ("The message names the word.", "`holdfast VERB --help`."),
    ExitCode.INVALID_JOB: ("`holdfast validate FILE`.", "Change what each finding names."),
    ExitCode.CANNOT_RUN_HERE: ("`holdfast validate FILE`.", "Change the job, or use a target that supports it."),
    ExitCode.NOT_FOUND: ("`holdfast ps`, `ls`.", "Use a name that exists."),
    ExitCode.UNAVAILABLE: ("`holdfast status`, the end of controller.log.", "`holdfast attach` starts it again."),
    ExitCode.INTERNAL: ("The file that the message names.", "Report it with that file."),
    ExitCode.OUTPUT_LOST: ("`df` of where it writes to.", "Make room there, or write it somewhere else."),
    ExitCode.STORAGE_FAILED: ("`df`, `mount`, `dmesg`; `holdfast status`.", "Free or repair the disk, and run again."),
    ExitCode.CHECKPOINTED_AND_EXITED: (
        "`holdfast status`: who cancelled it.",
        "Run it again: it resumes from its checkpoint.",
    ),
    ExitCode.NOT_PERMITTED: ("`ls -l` of the run's folder.", "Ask its owner."),
    ExitCode.NODES_LOST: (
        "`holdfast diagnose RUN`.",
        "Fix the nodes; raise `recovery.max_restarts` only if the failures are unrelated.",
    ),
    ExitCode.HUNG: ("`holdfast diagnose RUN`: the rank, and its stacks.", "Fix what that rank waits for."),
    ExitCode.SUPERSEDED: (
        "`controller-started` in `holdfast events`.",
        "Nothing: the other one continues the run.",
    ),
    **dict.fromkeys(
        (
            ExitCode.FABRIC_NOT_ACCEPTED,
            ExitCode.SCALING_NOT_ACCEPTED,
            ExitCode.GANG_NOT_ACCEPTED,
            ExitCode.FIRST_RUN_NOT_ACCEPTED,
            ExitCode.RESTART_NOT_ACCEPTED,
            ExitCode.LADDER_NOT_ACCEPTED,
        ),
        ("The report of the acceptance: what was measured, and the reason.", "Do what its finding says."),
    ),
    ExitCode.NOT_EXECUTABLE: ("`ls -l PROGRAM`, its first line.", "`chmod +x PROGRAM`."),
    ExitCode.PROGRAM_NOT_FOUND: (
        "`command -v PROGRAM`, `ldd PROGRAM` in the container.",
        "Install it, or the library that it lacks, or fix PATH.",
    ),
    ExitCode.CANCELLED: ("`holdfast status`: who cancelled.", "Nothing."),
}
"""How to confirm each of holdfast's exit codes, and what to do; errors.py gives their meaning."""

PASSED_THROUGH_NOTE = "From `holdfast run` it may be the program's own: then the run's last line is `exited with code`."


def rows() -> Iterator[Explanation]:
    """Signals by name, number and 128 + number; statuses by number."""
    for one in SIGNALS:
        number = int(one.number)
        yield Explanation(
            code=one.number.name,
            title=f"signal {number}; exit status {128 + number}, or -{number} in torchrun",
            cause=one.cause,
            confirm=one.confirm,
            remedy=one.remedy,
            source=SIGNALS_SOURCE,
            names=(f"-{number}", str(128 + number), f"signal {number}", f"exit {128 + number}", f"exitcode -{number}"),
        )
    for status in STATUSES:
        yield Explanation(
            code=f"exit-{status.number}",
            title="of the job's own program",
            cause=status.meaning,
            confirm=status.confirm,
            remedy=status.remedy,
            source=status.source,
            names=(str(status.number), f"exit status {status.number}", f"exitcode {status.number}"),
        )
    for code, (confirm, remedy) in EXIT_CODES.items():
        yield Explanation(
            code=f"holdfast-exit-{code.value}",
            title=f"{code.name}, of the holdfast command",
            cause=EXIT_CODE_MEANINGS[code],
            confirm=f"{confirm} {PASSED_THROUGH_NOTE}" if code else confirm,
            remedy=remedy,
            source=OWN_SOURCE,
            names=(str(code.value), f"exit {code.value}", code.name),
        )
