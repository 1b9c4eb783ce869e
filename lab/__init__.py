"""A Kubernetes control plane without containers: real programs of the real projects, run as processes of this machine.

`python -m lab up` starts one, `python -m lab down` leaves nothing of it. From Python:

    lab = Lab(folder)
    lab.up()
    lab.kubectl("get", "nodes")
    lab.down()

It owns how a cluster comes to be and goes; what holdfast does on a cluster is none of its business.
"""

from lab.lab import Lab

__all__ = ["Lab"]
