"""One small network per run, made of network namespaces: each node has its own address, host name and bandwidth limit.

It starts no processes: put `NetnsNode.prefix` before the command of each.

eth0, net1 = NetnsInterface(name="eth0", mbit=100), NetnsInterface(name="net1")
network = NetnsNetwork.create("k3m9tz", interfaces=(eth0, net1))
node0, node1 = network.add_node("node0"), network.add_node("node1")
await asyncio.create_subprocess_exec(*node0.prefix, "python", "train.py")
network.partition("node1")
network.heal("node1")
network.remove()

The bridges are in a separate namespace, the hub. The machine sees one interface per run, which has the controller's
address. So the machine's firewall (for example br_netfilter, Docker's FORWARD policy) does not affect traffic between
nodes, and removing the hub removes all links.

Every namespace is pinned by a bind mount in the run's tmpfs. Like /run/netns, the tmpfs is a shared mount: unpinning
propagates to other mount namespaces, so the kernel can free the namespace.

Without privileges the same works in a user namespace: call `enter_rootless` first in the process that will own the
network. There every node's mount namespace has the pins too, so a network outlives its owner as long as a process
runs in it. A new owner finds it through such a process.
"""

from holdfast.launch.local.netns.netns_support import rates_unavailable, unavailable
from holdfast.launch.local.netns.network import NetnsInterface, NetnsNetwork, NetnsNode, leftovers, remove
from holdfast.launch.local.netns.rootless import enter_rootless

__all__ = [
    "NetnsInterface",
    "NetnsNetwork",
    "NetnsNode",
    "enter_rootless",
    "leftovers",
    "rates_unavailable",
    "remove",
    "unavailable",
]
