"""JAX that names its own coordinator, as a script written for a fixed pair of hosts does."""

import os
import sys

import jax
from jax_loop import train

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(
    f"127.0.0.1:{sys.argv[1]}", num_processes=int(os.environ["WORLD_SIZE"]), process_id=int(os.environ["RANK"])
)
train()
