"""Submits a run to a cluster."""
