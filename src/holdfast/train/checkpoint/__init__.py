"""Checkpoints: what is saved, where it is stored, and what makes one valid."""
