"""The target `slurm`: nodes are those of an allocation that the run asks Slurm for."""
