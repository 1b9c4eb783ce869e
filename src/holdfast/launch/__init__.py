"""Turns a job into nodes and ranks: the environment of every rank (rank_env.py) and the backends that make nodes."""
