"""A Kubernetes control plane without containers: the real programs, run as processes of this machine.

`python -m lab up` starts one, `python -m lab down` removes it completely. From Python:

    lab = Lab(folder)
    lab.up()
    lab.kubectl("get", "nodes")
    lab.down()

The package only starts and stops clusters; it contains nothing about holdfast's use of them.
"""

from lab.kubelet.nodes import NodeState
from lab.lab import Lab

__all__ = ["Lab", "NodeState"]
