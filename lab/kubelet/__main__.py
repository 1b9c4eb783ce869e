"""`python -m lab.kubelet CONFIGURATION`: a proxy, and behind it the kubelet in separate namespaces."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from holdfast.host import processes
from holdfast.launch.local.netns import remove
from holdfast.launch.local.netns.namespace import privileged
from lab.kubelet import proxy
from lab.kubelet.configuration import load

# The kubelet's mounts, such as in-memory volumes, disappear when it exits.
_APART = ("unshare", "--mount", "--propagation=slave", "--")


async def run_kubelet(path: Path) -> int:
    """Run both until the kubelet exits or SIGTERM arrives; return the kubelet's exit code."""
    configuration = load(path)
    for socket in (configuration.api_socket, configuration.own_socket):
        socket.unlink(missing_ok=True)
    outward = proxy.forward(proxy.to_port("127.0.0.1", configuration.apiserver))
    inward = proxy.forward(proxy.to_unix(configuration.own_socket))
    await asyncio.start_unix_server(outward, configuration.api_socket)
    await asyncio.start_server(inward, configuration.host, configuration.port)
    kubelet = await asyncio.create_subprocess_exec(
        *(_APART if privileged() else ()),
        *(sys.executable, "-m", "lab.kubelet.kubelet", str(path)),
        preexec_fn=processes.die_with_parent,
    )
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, kubelet.terminate)
    code = await kubelet.wait()
    await asyncio.to_thread(remove, configuration.tag)
    return code


if __name__ == "__main__":
    sys.exit(asyncio.run(run_kubelet(Path(sys.argv[1]))))
