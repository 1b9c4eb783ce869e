"""Acceptance checks of a target, with real runs: what `holdfast accept` does."""
