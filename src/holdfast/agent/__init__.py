"""The agent: one process per node that connects to the controller, starts and monitors ranks, and reports events."""
