"""The loop of the JAX programs; NumPy saves its results."""

import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from killed import killed_once, tell


def train() -> None:
    rank = jax.process_index()
    first, weights = 0, jnp.zeros(4)
    if os.path.exists("weights.npz"):
        saved = np.load("weights.npz")
        first, weights = int(saved["epoch"]) + 1, jnp.asarray(saved["weights"])
    for epoch in range(first, 4):
        killed_once(rank, epoch)
        gradients = multihost_utils.process_allgather(jnp.full(4, float(epoch + rank)))
        weights = weights - 0.1 * gradients.mean(axis=0)
        if rank == 0:
            np.savez("new.npz", epoch=epoch, weights=np.asarray(weights))
            os.replace("new.npz", "weights.npz")
        multihost_utils.sync_global_devices(f"epoch-{epoch}")
    tell(rank, first, float(weights.sum()))
