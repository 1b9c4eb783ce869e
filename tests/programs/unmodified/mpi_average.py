"""mpi4py: an average over all ranks, with its own pickle."""

import os
import pickle

from killed import killed_once, tell
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank = comm.Get_rank()
first, value = 0, 0.0
if os.path.exists("state.pickle"):
    with open("state.pickle", "rb") as file:
        first, value = pickle.load(file)
for epoch in range(first, 4):
    killed_once(rank, epoch)
    value += comm.allreduce(float(rank + epoch)) / comm.Get_size()
    if rank == 0:
        with open("state.new", "wb") as file:
            pickle.dump((epoch + 1, value), file)
        os.replace("state.new", "state.pickle")
    comm.Barrier()
tell(rank, first, value)
