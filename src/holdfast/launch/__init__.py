"""Turns a job into nodes and ranks: what every rank is given (rank_env.py), and the places nodes come from."""
