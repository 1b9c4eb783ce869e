"""Owns network namespaces: one small network per run, whose nodes have addresses, names and rates of their own.

It refuses to own what runs in a node: give `Node.prefix` to whatever starts processes.

    network = Network.create("k3m9tz", interfaces=(Interface(name="eth0", mbit=100), Interface(name="net1")))
    node0, node1 = network.add("node0"), network.add("node1")
    await asyncio.create_subprocess_exec(*node0.prefix, "python", "train.py")
    network.partition("node1")
    network.heal("node1")
    network.remove()

The bridges lie in a namespace of their own, the hub; the machine sees one interface per run, which holds the
controller's address. So the machine's firewall (br_netfilter and Docker's FORWARD policy, say) has no part in what
nodes send each other, and all of it goes when the hub goes.

Every namespace is pinned in the run's own tmpfs. It is shared, as /run/netns is, so that an unpinned namespace goes
although other mount namespaces hold copies of the pin.

Without privileges the same works in a user namespace: call `enter_rootless` first thing in the process that is to own
the network. There the pins live in every node's mount namespace too, so a network outlives its owner for as long as
a process lives in it; a new owner finds it through such a process.
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
