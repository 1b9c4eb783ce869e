"""Verifies nodes before a run: checks of one node, and the comparison of several."""
