"""A kubelet whose containers are processes of this machine: `python -m lab.kubelet`, of which each lab has one.

It is many nodes at once. A pod has a network namespace of its own, with an address and names; a container a mount
namespace, in which its volumes lie where it wants them on an otherwise unchanged machine. An image is a name only.

    proxy.py         outside: joins the lab's loopback ports to the Unix sockets of the rest
    kubelet.py      what is to run where, by watching the API server
    nodes.py        nodes: registered, alive, off
    pod.py          a pod's life, from its volumes to its last status
    container.py    a container: its process, its restarts, its log
    container_fs.py        what a container sees; runs in its namespaces, before it
    container_env.py, volumes.py, pvc.py, probes.py, names.py, pod_sandbox.py, status.py: what their names say
    server.py, exec.py, logs.py: what `kubectl logs` and `kubectl exec` speak with

It refuses to keep what only a container runtime can: images, users, devices, limits.
"""
