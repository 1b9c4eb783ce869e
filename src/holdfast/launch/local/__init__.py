"""The local target: nodes as processes on this machine. It is the specification of every other kind."""
