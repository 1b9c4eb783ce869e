"""Lines that show what ranks do in C and C++."""

from __future__ import annotations

from holdfast.diagnose.native_groups import OLDER, describe_missing, describe_native
from holdfast.events import StacksDumped


def dumped(rank: int, native: tuple[str, ...] | None, *, missing: str = "", replica: int = 0) -> StacksDumped:
    return StacksDumped(
        at=1.0,
        node=rank,
        replica=replica,
        attempt=0,
        rank=rank,
        process_state="S",
        frames=("step (t.py:3)", "main (t.py:9)"),
        native=native,
        native_missing=missing,
    )


def test_ranks_with_equal_native_frames_share_a_line_with_their_python_frame() -> None:
    waits = ("poll (libc.so.6)", "gloo::recv (libtorch_cpu.so)")
    taken = [dumped(1, ("sleep (libc.so.6)",)), dumped(0, waits), dumped(2, waits), dumped(3, ())]
    assert describe_native(taken) == (
        "native: 2 ranks (0, 2) in poll (libc.so.6) < gloo::recv (libtorch_cpu.so) < step (t.py:3)",
        "native: rank 1 in sleep (libc.so.6) < step (t.py:3)",
        "native: rank 3 in step (t.py:3)",
    )
    assert describe_missing(taken) == ()


def test_ranks_without_native_frames_have_a_reason_and_those_of_an_older_agent_too() -> None:
    taken = [dumped(0, None, missing="no ptrace"), dumped(1, None, missing="no ptrace"), dumped(2, None)]
    assert describe_native(taken) == ()
    assert describe_missing(taken) == (
        "no native frames of rank 0-1: no ptrace",
        f"no native frames of rank 2: {OLDER}",
    )


def test_only_the_largest_groups_are_shown_and_replicas_are_kept_apart() -> None:
    taken = [dumped(rank, (f"f{rank} (a.so)",), replica=rank % 2) for rank in range(11)]
    lines = describe_native(taken)
    assert lines[-1] == "native: 3 more kinds"
    assert "of replica 1" in lines[1]
