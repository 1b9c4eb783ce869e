"""`python -m bench.planted NODE COMMAND...`: runs a command on a node of the bench, which `VARIABLE` describes."""

from __future__ import annotations

import os
import sys

from bench.planted.node_entry import VARIABLE, Planted, become_node

node, *command = sys.argv[1:]
become_node(Planted.read(os.environ[VARIABLE]), int(node))
os.execvp(command[0], command)
