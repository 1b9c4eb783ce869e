"""Decides what a run does next: a pure state machine, its failure policy, and the controller that does the I/O."""
