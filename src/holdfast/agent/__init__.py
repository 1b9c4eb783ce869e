"""The agent: one per node; connects out to the controller, starts ranks, watches them, says what happens to them."""
