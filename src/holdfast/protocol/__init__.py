"""Messages between processes: agent orders, rank messages, HTTP routes and their limits."""
