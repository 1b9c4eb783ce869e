"""Turns a job into nodes and ranks: the environment of every rank (rank_env.py) and the back ends that make nodes."""
