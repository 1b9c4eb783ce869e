"""Checks of one node, by subject; each function yields what is wrong."""
