"""Keeps a local copy of a run folder that lives in the cluster."""
