"""The local back end: nodes as processes of this machine. It is the specification for every other one."""
