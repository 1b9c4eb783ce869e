"""Reads structured input: dumps, error files, Kubernetes objects, JSON logs."""
