"""Reads what is no log but says what happened: dumps, error files, Kubernetes objects, a run's own events."""
