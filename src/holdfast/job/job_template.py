"""The job file that `holdfast init` writes; a test parses it, so that it stays valid."""

from __future__ import annotations

import re

from holdfast.job.yaml_source import as_yaml

_TEMPLATE = """\
# A holdfast job: what to run, on how many nodes, and how to recover from failures.
# `holdfast validate` checks this file, `holdfast render` shows what each rank gets, `holdfast run` starts it.
version: 1
name: {name}

# The program and its arguments. No shell runs; for one, write [bash, -c, "..."].
command: [python, train.py]
{image}  # container image on a cluster, with holdfast installed; local runs ignore it
# launch: per-node        # for a command that starts its own ranks, such as torchrun
# workdir: .              # the folder it runs in, relative to this file

nodes: 2
gpus_per_node: 0
# ranks_per_node: 2       # default: one per GPU, or one where there are no GPUs

# Variables of every rank. Values are stored with the run and shown, so secrets go below.
# env:
#   DATA: /data/train
# secrets:
#   HF_TOKEN: {{env: HF_TOKEN}}          # taken from your environment when the run starts
#   WANDB_API_KEY: {{file: wandb.key}}    # or from a file

# fabric: infiniband      # `holdfast fabric` lists the names; the default is the target's
# resources:              # of one node
#   cpu: 16
#   memory: 64GiB

# Used by holdfast.train.
checkpoint:
  path: checkpoints       # a folder that every node reaches
  every_steps: 100
  keep: 3

recovery:
  max_restarts: 10        # within restart_window_s seconds; the next failure ends the run
  restart_window_s: 3600
  # step_timeout_s: 600  # a rank without a step for this long is hung; auto by default, or off

# logs:
#   max_bytes: 1GiB       # per rank, over all attempts; the oldest output is dropped
"""


def job_template(folder_name: str = "job", *, image: str | None = None) -> str:
    """A valid, commented job file; the job gets the name of its folder."""
    shown = "# image: REGISTRY/NAME:TAG" if image is None else f"image: {as_yaml(image)}"
    name = re.sub(r"[^a-z0-9]+", "-", folder_name.lower()).lstrip("-0123456789")[:40].rstrip("-")
    return _TEMPLATE.format(name=name or "job", image=shown)
