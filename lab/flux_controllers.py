"""Flux in a lab: the controllers of sources and of Kustomizations, built with Go the first time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator

from lab import ports
from lab.extra_program import extra_program
from lab.install import await_established
from lab.lab import Lab
from lab.toolchain import FLUX, program_folder, source_folder

_MODULES = ("github.com/fluxcd/source-controller", "github.com/fluxcd/kustomize-controller")
_OPTIONS = ("--metrics-addr=0", "--events-addr=", "--log-level=info")


@contextlib.contextmanager
def flux_controllers(lab: Lab) -> Generator[None]:
    """Have a lab serve Flux's kinds of objects, and run the controllers of two of them."""
    definitions = [path for module in _MODULES for path in (source_folder(FLUX, module) / "config/crd/bases").iterdir()]
    lab.kubectl("apply", "--server-side", *(word for path in definitions for word in ("-f", path)))
    plurals = ((stem := path.stem.split("_"))[1] + "." + stem[0] for path in definitions)
    await_established(lab.client(), plurals)
    held, first = ports.claim_block(3)
    storage, *health = (f"127.0.0.1:{first + number}" for number in range(3))
    folder = program_folder(FLUX)
    artifacts = lab.folder / "artifacts"
    artifacts.mkdir(exist_ok=True)
    serves = (f"--storage-path={artifacts}", f"--storage-addr={storage}", f"--storage-adv-addr={storage}")
    try:
        with (
            extra_program(
                lab, "source-controller", folder / "source-controller", *_OPTIONS, *serves, f"--health-addr={health[0]}"
            ),
            extra_program(
                lab, "kustomize-controller", folder / "kustomize-controller", *_OPTIONS, f"--health-addr={health[1]}"
            ),
        ):
            yield
    finally:
        os.close(held)
