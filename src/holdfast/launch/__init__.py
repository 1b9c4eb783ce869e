"""Turns a job into nodes and ranks: what every rank is given (environment.py), and the places nodes come from."""
