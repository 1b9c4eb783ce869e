"""Decides what a run does next: a pure machine over events, the policy it asks, the controller that does the I/O."""
