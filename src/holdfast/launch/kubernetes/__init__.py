"""The Kubernetes target: renders a run's objects with pure functions, creates them, and follows the run.

`manifests` has one file for each kind of object that owns the nodes' pods (such as jobset).
`incluster` runs in the controller's pod: a supervisor, and the controller's backend, which watches the pods. On the
user's machine `submit` creates the objects, and the sync process (`sync`) reads the run's state from
incluster/sync_server.py in the controller's pod, through the API server's port-forward. Only client/cluster.py imports
a Kubernetes client.
"""
