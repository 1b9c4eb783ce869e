"""Checks a cluster and a job before the run."""
