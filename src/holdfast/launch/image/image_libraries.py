"""The tables of libraries and programs that an image needs, by network and by launcher."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from msgspec import Struct


class ImageNeed(Struct, frozen=True, kw_only=True):
    """A file that an image needs for one purpose."""

    file: str
    """Regular expression of its path in the image."""
    what: str
    """Its name in a message."""
    package: str
    """What installs it."""


class Purpose(Struct, frozen=True, kw_only=True):
    """The files that one purpose needs, and the Dockerfile lines that install them."""

    needs: tuple[ImageNeed, ...]
    lines: tuple[str, ...]


def apt_install(*packages: str) -> str:
    """The Dockerfile line that installs packages of Debian or Ubuntu."""
    listed = " ".join(packages)
    return f"RUN apt-get update && apt-get install -y --no-install-recommends {listed} && rm -rf /var/lib/apt/lists/*"


_EFA = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start-nccl.html"
NETWORKS: Mapping[str, Purpose] = MappingProxyType(
    {
        # NCCL opens libibverbs.so.1, which opens the adapter's provider; without either it reports no IB device.
        "IB": Purpose(
            needs=(
                ImageNeed(file=r".+/libibverbs\.so\.1", what="libibverbs", package="libibverbs1"),
                ImageNeed(
                    file=r".+/libmlx5-rdmav\d+\.so",
                    what="the provider of Mellanox adapters",
                    package="ibverbs-providers",
                ),
            ),
            lines=(apt_install("libibverbs1", "ibverbs-providers", "librdmacm1"),),
        ),
        "AWS Libfabric": Purpose(
            needs=(
                ImageNeed(file=r".+/libfabric\.so\.1", what="libfabric", package="the EFA installer"),
                ImageNeed(file=r".+/libnccl-net(-ofi)?\.so(\..+)?", what="aws-ofi-nccl", package="the EFA installer"),
            ),
            lines=(
                "ARG EFA_INSTALLER=1.47.0",
                f"# {_EFA}",
                "RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates curl \\",
                " && curl -fsSL https://efa-installer.amazonaws.com/aws-efa-installer-$EFA_INSTALLER.tar.gz \\",
                "    | tar -xz -C /tmp \\",
                " && cd /tmp/aws-efa-installer && ./efa_installer.sh -y --skip-kmod --skip-limit-conf --no-verify \\",
                " && rm -rf /tmp/aws-efa-installer /var/lib/apt/lists/*",
            ),
        ),
    }
)
"""By the name of NCCL's network module; the plugins of other networks come from the machine or are in NCCL."""

MPI = Purpose(
    needs=(
        ImageNeed(file=r"usr/(local/)?s?bin/sshd", what="sshd", package="openssh-server"),
        ImageNeed(file=r"usr/(local/)?bin/ssh", what="ssh", package="openssh-client"),
        ImageNeed(file=r"(.+/)?bin/mpirun", what="mpirun", package="openmpi-bin"),
    ),
    lines=(apt_install("openssh-server", "openssh-client", "openmpi-bin"), "RUN mkdir -p /run/sshd"),
)
"""What `workload: mpijob` needs."""
