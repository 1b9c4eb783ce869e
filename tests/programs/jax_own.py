"""A JAX program that names its own coordinator, as many do: `jax_own.py PORT`. Prints the sum of all ranks."""

from __future__ import annotations

import os
import sys

import jax
from jax.experimental.multihost_utils import process_allgather


def main() -> None:
    coordinator = f"localhost:{sys.argv[1]}"
    jax.distributed.initialize(coordinator, int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]))
    total = process_allgather(jax.numpy.array(float(jax.process_index()))).sum()
    jax.distributed.shutdown()
    print(f"sum {float(total)}", flush=True)


if __name__ == "__main__":
    main()
