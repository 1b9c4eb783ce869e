"""Checks of the job's interpreter and of its torch."""

from __future__ import annotations

import platform
import sys
from dataclasses import replace

import pytest
from tests.preflight.conftest import MakeNode, codes

from holdfast.findings import Severity
from holdfast.preflight.checks import software
from holdfast.preflight.node_view import NotLookedAt, run_command

PYTHON = "/opt/env/bin/python"
# Of an environment with torch 2.15.0+cu132 from its index.
CUDA_BUILD = """python 3.12.7
package nvidia_nccl_cu13-2.30.7.dist-info
package torch-2.15.0+cu132.dist-info
package holdfast-0.1.0.dist-info
package PyYAML-6.0.2-py3.12.egg-info
torch from typing import Optional
torch
torch __all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip', 'rocm', 'xpu']
torch __version__ = '2.15.0+cu132'
torch debug = False
torch cuda: Optional[str] = '13.2'
torch git_version = 'd0f2af8b66b20da4baa50644c0cd3f887a2eae2e'
torch hip: Optional[str] = None
torch rocm: Optional[str] = None
torch xpu: Optional[str] = None
"""
CPU_BUILD = CUDA_BUILD.replace("'13.2'", "None").replace("+cu132", "+cpu")
ROCM_BUILD = CUDA_BUILD.replace("'13.2'", "None").replace("hip: Optional[str] = None", "hip: Optional[str] = '7.0'")
WITHOUT_TORCH = "python 3.12.7\npackage jax-0.8.0.dist-info\n"
JAX_BESIDE_CPU_TORCH = CPU_BUILD + "package jax_cuda12_plugin-0.8.0.dist-info\n"


def test_versions_are_those_of_the_interpreter(node: MakeNode) -> None:
    view = node(commands={PYTHON: CUDA_BUILD}, python=PYTHON)
    assert software.software_facts(view) == {
        "Python": "3.12.7",
        "torch": "2.15.0+cu132",
        "CUDA": "13.2",
        "NCCL": "2.30.7",
    }
    assert software.software_of(CUDA_BUILD).packages["pyyaml"] == "6.0.2"


def test_a_real_interpreter_answers(node: MakeNode) -> None:
    view = replace(node(python=sys.executable), run=run_command)
    assert [*software.python(view)] == []
    facts = software.software_facts(view)
    assert facts["Python"] == platform.python_version()
    assert facts["torch"].partition(".")[0].isdecimal()


@pytest.mark.parametrize(
    ("python", "answer", "code", "severity"),
    [
        (PYTHON, None, "python-missing", Severity.ERROR),
        ("python3", None, "python-missing", Severity.WARNING),  # the job may set PATH
        (PYTHON, "", "python-broken", Severity.ERROR),
        (PYTHON, TimeoutError("it has not answered within 5 s"), "python-slow", Severity.WARNING),
    ],
)
def test_interpreter_that_does_not_start_is_found(
    node: MakeNode, python: str, answer: str | Exception | None, code: str, severity: Severity
) -> None:
    view = node(commands={} if answer is None else {python: answer}, python=python, gpus=8)
    [finding] = software.python(view)
    assert (finding.code, finding.severity) == (code, severity)
    assert software.software_facts(view) == {}
    with pytest.raises(NotLookedAt):  # that it is a build for GPUs is another question
        [*software.accelerator_build(view)]


def test_command_without_an_interpreter_is_not_looked_at_further(node: MakeNode) -> None:
    view = node(gpus=8)
    assert [*software.python(view), *software.accelerator_build(view)] == []
    assert software.software_facts(view) == {}


def test_interpreter_in_the_code_is_relative_to_the_workdir(node: MakeNode) -> None:
    commands = {"/code/.venv/bin/python": CUDA_BUILD}
    assert [*software.python(node(commands=commands, python=".venv/bin/python", workdir="/code"))] == []
    with pytest.raises(NotLookedAt, match="not on this node yet"):
        [*software.python(node(commands=commands, python=".venv/bin/python"))]


@pytest.mark.parametrize(
    ("answer", "gpus", "expected"),
    [
        (CUDA_BUILD, 8, []),
        (ROCM_BUILD, 8, []),
        (CPU_BUILD, 0, []),
        (CPU_BUILD, 8, ["torch-without-gpu"]),
        (WITHOUT_TORCH, 8, []),
        (JAX_BESIDE_CPU_TORCH, 8, []),
    ],
)
def test_torch_of_a_job_with_gpus_is_a_build_for_gpus(
    node: MakeNode, answer: str, gpus: int, expected: list[str]
) -> None:
    view = node(commands={PYTHON: answer}, python=PYTHON, gpus=gpus)
    assert codes([*software.accelerator_build(view)]) == expected
