"""Owns what a run is on Kubernetes: its objects, rendered as plain data by pure functions; and how it is run there.

One file for each kind of object that carries the gang (jobset, trainjob, pytorchjob, mpijob). In the cluster a supervisor
holds the controller, whose back end sees the pods; here `starting` makes the objects, and a mirror asks a desk in the
controller's pod for what happens. Only cluster.py imports a client.
"""
