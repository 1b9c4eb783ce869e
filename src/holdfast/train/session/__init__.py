"""The training loop's side of a run: reports steps, saves when due, exits when requested."""
