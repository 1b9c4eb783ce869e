"""A kubelet whose containers are processes of this machine: `python -m lab.kubelet`, one per lab.

It simulates many nodes. Each pod has a network namespace with an address and host names. Each container has a mount
namespace with its volumes at their mount paths, on the otherwise unchanged file system of the machine. Images are not
pulled; only their names matter.

    proxy.py           outside the namespaces: connects the lab's loopback ports to the kubelet's Unix sockets
    kubelet.py         watches the API server and decides what runs where
    nodes.py           nodes: registration, heartbeats, power
    pod.py             pod lifecycle, from the volumes to the final status
    container.py       a container: its process, its restarts, its log
    container_fs.py    the file system of a container; runs in its namespaces, before its program
    container_env.py, hosts.py, pod_sandbox.py, probes.py, pvc.py, status.py, volumes.py: as named
    server.py, exec.py, logs.py: the endpoints behind `kubectl logs` and `kubectl exec`
    portforward.py, port_relay.py: the endpoint behind `pods/portforward`, for clients that speak WebSocket

It does not support what needs a container runtime: images, users, devices, limits.
"""
