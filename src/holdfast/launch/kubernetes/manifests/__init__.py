"""Renders the Kubernetes objects of a run."""
