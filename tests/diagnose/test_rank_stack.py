"""What remains of a dump: the training thread, without what differs between ranks that do the same."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from holdfast.agent.stack_dump import dump_stacks
from holdfast.diagnose.rank_stack import MAX_FRAMES, native_stack, training_stack, without_native
from holdfast.diagnose.wait_axes import Wait, waits_for

SITE = "/opt/venv/lib/python3.12/site-packages"
SUMS = f"""Process 811: python train.py
Python v3.12.4 (/opt/venv/bin/python3.12)

Thread 811 (idle): "MainThread"
    {{inside}}all_reduce ({SITE}/torch/distributed/distributed_c10d.py:2841)
    wrapper ({SITE}/torch/distributed/c10d_logger.py:83)
    _reduce ({SITE}/megatron/core/tensor_parallel/mappings.py:{{line}})
    step (/home/ada/train.py:12)
Thread 815 (idle): "Thread-1"
    wait (threading.py:359)
"""
BACKWARD = f"""Thread 811 (idle): "MainThread"
    _engine_run_backward ({SITE}/torch/autograd/graph.py:829)
    step (/home/ada/train.py:14)
Thread 816 (idle): "Thread-7"
    wait (threading.py:359)
Thread 817 (active): "Dummy-4"
    all_to_all_single ({SITE}/torch/distributed/distributed_c10d.py:4000)
    backward ({SITE}/megatron/core/transformer/moe/token_dispatcher.py:77)
"""
IN_A_THREAD = """Thread 811 (idle): "MainThread"
    join (threading.py:1149)
    main (/home/ada/train.py:90)
Thread 812 (idle): "trainer"
    barrier (/opt/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py:4700)
    fit (/home/ada/train.py:33)
"""
# Of `py-spy dump --native --full-filenames` 0.4.3 on torch 2.15 with Gloo; the template's arguments are shortened.
NATIVE = f"""Thread 811 (idle): "MainThread"
    0x7ff382ea3f16 (/usr/lib/x86_64-linux-gnu/libc.so.6)
    pthread_cond_wait (/usr/lib/x86_64-linux-gnu/libc.so.6)
    std::condition_variable::wait (/usr/lib/x86_64-linux-gnu/libstdc++.so.6.0.30)
    c10d::Work::wait (/opt/torch/lib/libtorch_cpu.so)
    pybind11::cpp_function::initialize<pybind11::cpp_function<bool, char [654]>(pybind11::name const, std::ratio<(long)1>)>::{{lambda(pybind11::detail::function_call&)#1}}::_FUN (/opt/torch/lib/libtorch_python.so)
    pybind11::cpp_function::dispatcher (/opt/torch/lib/libtorch_python.so)
    all_reduce ({SITE}/torch/distributed/distributed_c10d.py:4181)
    _exception_logger.<locals>.wrapper ({SITE}/torch/distributed/c10d_logger.py:83)
    time_sleep (/usr/lib/libpython3.11.so.1.0)
    <module> (/home/ada/train.py:6)
    0x7ff382e4524a (/usr/lib/x86_64-linux-gnu/libc.so.6)
"""  # noqa: E501


def test_ranks_in_one_call_are_equal_whatever_happens_within_it() -> None:
    plain = training_stack(SUMS.format(inside="", line=37))
    assert plain == ("all_reduce (distributed_c10d.py)", "_reduce (mappings.py)", "step (train.py:12)")
    inside = f"_wait ({SITE}/torch/_ops.py:1158)\n    pthread_cond_wait (libc.so.6)\n    "
    assert training_stack(SUMS.format(inside=inside, line=41)) == plain


def test_backward_functions_in_a_thread_of_autograd_belong_to_the_training_thread() -> None:
    stack = training_stack(BACKWARD)
    assert stack[:2] == ("all_to_all_single (distributed_c10d.py)", "backward (token_dispatcher.py)")
    assert stack[-1] == "step (train.py:14)"
    assert waits_for(stack) is Wait.EP


def test_thread_in_a_collective_counts_where_the_main_thread_only_joins_it() -> None:
    assert training_stack(IN_A_THREAD) == ("barrier (distributed_c10d.py)", "fit (train.py:33)")


def test_deep_stack_is_cut_and_damaged_or_empty_dumps_have_none() -> None:
    deep = 'Thread 1 (active): "MainThread"\n' + "".join(f"    f{n} (/home/ada/t.py:{n})\n" for n in range(99))
    assert len(training_stack(deep)) == MAX_FRAMES
    for damaged in ("", "Process 1: x\n", 'Thread 1 (idle): "MainThread"\n', "    f (a.py:1)\n", "Thread \0((("):
        assert training_stack(damaged) == ()


def test_wait_is_told_by_the_names_of_training_code() -> None:
    call = "all_reduce (distributed_c10d.py)"
    cases = {
        (): Wait.NONE,
        ("forward (mlp.py)", "_reduce (mappings.py)"): Wait.NONE,
        (call, "_reduce (mappings.py)"): Wait.TP,
        (call, "loss (train.py:9)"): Wait.UNKNOWN_GROUP,
        (call, "get_grad_norm_fp32 (clip_grads.py)"): Wait.ALL,
        ("reduce_scatter_tensor (distributed_c10d.py)", "finish_grad_sync (param_and_grad_buffer.py)"): Wait.DP,
        ("all_gather (distributed_c10d.py)", "forward (context_parallel.py)"): Wait.CP,
        ("_communicate (p2p_communication.py)", "recv_forward (p2p_communication.py)"): Wait.PREVIOUS_STAGE,
        ("_communicate (p2p_communication.py)", "recv_backward (p2p_communication.py)"): Wait.NEXT_STAGE,
        ("_wait_batch_p2p (schedules.py)", "step (schedules.py)"): Wait.OTHER_STAGE,
        ("recv (distributed_c10d.py)", "next_part (stages.py:8)"): Wait.OTHER_STAGE,
        ("wait (threading.py)", "Group.vote@waits-for-replicas (x.py)"): Wait.ALL,
    }
    assert {stack: waits_for(stack) for stack in cases} == cases


def test_real_dump_of_a_rank_that_computes(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        "import sys, threading\n"
        "def read():\n    print('here', flush=True)\n    sys.stdin.read()\n"
        "def step():\n    read()\n"
        "step()\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, program], stdin=pipe, stdout=pipe) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        dumped = asyncio.run(dump_stacks(rank.pid, tmp_path / "stacks.txt"))
        rank.communicate()
    assert dumped.frames == ("read (train.py:4)", "step (train.py:6)", "<module> (train.py:7)")
    assert waits_for(dumped.frames) is Wait.NONE


def test_native_frames_are_those_within_the_innermost_python_frame_and_change_no_comparison() -> None:
    assert native_stack(NATIVE) == (
        "pthread_cond_wait (libc.so.6)",
        "std::condition_variable::wait (libstdc++.so.6.0.30)",
        "c10d::Work::wait (libtorch_cpu.so)",
    )
    plain = without_native(NATIVE)
    assert "libc" not in plain
    assert (
        training_stack(NATIVE) == training_stack(plain) == ("all_reduce (distributed_c10d.py)", "<module> (train.py:6)")
    )
    assert native_stack(plain) == ()


def test_native_function_without_a_name_stands_for_its_library_and_templates_lose_their_arguments() -> None:
    dump = (
        'Thread 1 (active): "MainThread"\n'
        "    0x7f1 (/usr/lib/libcuda.so.1)\n"
        "    at::(anonymous namespace)::run<float, at::Tensor (int)>(std::pair<int>) const (/opt/libtorch_cuda.so)\n"
        "    step (/home/ada/t.py:1)\n"
    )
    assert native_stack(dump) == ("? (libcuda.so.1)", "at::run (libtorch_cuda.so)")


def test_qualified_names_of_newer_pythons_show_the_same_waits() -> None:
    dump = f"""Thread 1 (idle): "MainThread"
    P2PCommunicator._communicate ({SITE}/megatron/core/pipeline_parallel/p2p_communication.py:1)
    P2PCommunicator.recv_forward ({SITE}/megatron/core/pipeline_parallel/p2p_communication.py:2)
    """
    assert waits_for(training_stack(dump)) is Wait.PREVIOUS_STAGE
