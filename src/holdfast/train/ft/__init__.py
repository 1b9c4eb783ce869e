"""Fault tolerance: replicas, peer checkpoints and state transfer in memory."""
