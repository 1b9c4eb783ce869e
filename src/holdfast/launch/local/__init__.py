"""The local back end: nodes as processes on this machine. It is the specification for every other back end."""
