"""Owns what a run is on Kubernetes: its objects as plain data, rendered by pure functions; no client is imported here.

One file for each kind of object that carries the gang (jobset, trainjob, pytorchjob, mpijob); the rest are nouns that
these share.
"""
