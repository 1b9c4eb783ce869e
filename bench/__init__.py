"""Benchmarks: one command for each claim that holdfast makes in figures, with its peer measured in the same minutes."""
