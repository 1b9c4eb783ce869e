"""Checkpoints: what they contain, where they are stored, and what makes one valid."""
