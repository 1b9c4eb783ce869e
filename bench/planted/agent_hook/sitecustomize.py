"""On PYTHONPATH of a bench's run: makes each agent a node of the bench (bench/planted/node_entry.py)."""

from bench.planted.node_entry import enter_agent

enter_agent()
