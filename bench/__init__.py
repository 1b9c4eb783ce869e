"""What holdfast claims in figures, measured: one command a claim, its peer measured in the same minutes."""
