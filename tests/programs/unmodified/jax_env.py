"""JAX with a coordinator from the environment."""

import os

import jax
from jax_loop import train

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(num_processes=int(os.environ["WORLD_SIZE"]), process_id=int(os.environ["RANK"]))
train()
