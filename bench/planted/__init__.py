"""Nodes with faults planted on purpose: the table of kinds, and what makes a process of this machine such a node."""
