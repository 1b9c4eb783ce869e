"""The backends of benches are those that the controller expects: nothing checks the types of bench/."""

from __future__ import annotations

import inspect

from bench.null_backend import NullBackend
from bench.simulated_run import SimulatedBackend

from holdfast.job.backend import Backend


def test_backends_of_benches_have_every_method_of_a_backend() -> None:
    for name, method in inspect.getmembers(Backend, inspect.isfunction):
        if name.startswith("_"):
            continue
        for backend in (NullBackend, SimulatedBackend):
            own = getattr(backend, name)
            assert own is not method, name
            assert inspect.signature(own).parameters.keys() == inspect.signature(method).parameters.keys(), name
