"""Volcano's scheduler in a lab, for as long as a test or a bench needs it; built with Go the first time."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator

from lab.extra_program import extra_program
from lab.install import await_established
from lab.lab import Lab
from lab.toolchain import VOLCANO, program_folder, source_folder

NAME = "volcano"
"""What pods call it in `schedulerName`."""
_CRDS = "installer/helm/chart/volcano/crd/bases"
_KINDS = ("podgroups.scheduling.volcano.sh", "queues.scheduling.volcano.sh", "hypernodes.topology.volcano.sh")
_CONFIGURATION = """
actions: "enqueue, allocate, backfill"
tiers:
- plugins:
  - name: priority
  - name: gang
  - name: conformance
- plugins:
  - name: overcommit
  - name: drf
  - name: predicates
  - name: proportion
  - name: nodeorder
  - name: network-topology-aware
"""
"""The scheduler's default, and the plugin that places jobs by HyperNodes."""


def install_kinds(lab: Lab) -> None:
    """Have a lab serve Volcano's kinds of objects."""
    lab.kubectl("apply", "--server-side", "-f", source_folder(VOLCANO, "volcano.sh/volcano") / _CRDS)
    await_established(lab.client(), _KINDS)


def make_queue(lab: Lab, name: str, **spec: object) -> None:
    """Create an open queue: Volcano's controllers, which would open it, do not run."""
    queue = {"apiVersion": "scheduling.volcano.sh/v1beta1", "kind": "Queue", "metadata": {"name": name}, "spec": spec}
    lab.kubectl("apply", "--server-side", "-f", "-", input=json.dumps(queue))
    opened = ("--subresource=status", "--type=merge", "-p", '{"status": {"state": "Open"}}')
    lab.kubectl("patch", "queues.scheduling.volcano.sh", name, *opened)


@contextlib.contextmanager
def volcano_scheduler(lab: Lab) -> Generator[None]:
    """Run the scheduler, with the queue `default`.

    Volcano's controllers and webhooks do not run: they are for its own kinds of jobs.
    """
    install_kinds(lab)
    make_queue(lab, "default", weight=1)
    configuration = lab.folder / "configuration" / f"{NAME}.yaml"
    configuration.write_text(_CONFIGURATION)
    with extra_program(
        lab,
        NAME,
        program_folder(VOLCANO) / "scheduler",
        f"--kubeconfig={lab.kubeconfig}",
        f"--scheduler-name={NAME}",
        f"--scheduler-conf={configuration}",
        "--leader-elect=false",
        "--schedule-period=500ms",
        "--cache-dumper=false",
        "--logtostderr",
    ):
        yield
