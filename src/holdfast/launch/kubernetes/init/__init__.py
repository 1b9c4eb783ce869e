"""Writes a first target file from what a cluster shows."""
