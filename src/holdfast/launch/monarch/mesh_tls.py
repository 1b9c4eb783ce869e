"""Certificates by which Monarch's processes on several machines accept one another, and refuse all others."""

from __future__ import annotations

from pathlib import Path

import msgspec

from holdfast.host.files import atomic_write, read_small

AUTHORITY_NAME, IDENTITY_NAME, CA_NAME = "authority.pem", "identity.pem", "ca.pem"


class MeshIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What a Monarch process proves itself with, and by whom others have to be certified; PEM."""

    address: str
    """The IP address on which it listens, which its certificate names."""
    port: int
    """The port there; 0 for one that the kernel chooses."""
    identity: str
    """Its key and its certificate."""
    ca: str


class MeshAuthority:
    """The CA of one run's Monarch processes; its key stays in the controller's folder, for nodes that come later."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / AUTHORITY_NAME

    def issue(self, address: str, port: int = 0) -> MeshIdentity:
        """A certificate for a process at an IP address."""
        from holdfast.security.certificates import RunAuthority

        if self._path.exists():
            authority = RunAuthority.load(read_small(self._path))
        else:
            authority = RunAuthority.create()
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            atomic_write(self._path, authority.private_pem)
        return MeshIdentity(
            address=address,
            port=port,
            identity=authority.issue_for_peer(address).decode(),
            ca=authority.certificate_pem.decode(),
        )


def store(folder: Path, own: MeshIdentity) -> None:
    """Write what a Monarch process proves itself with, as private files."""
    atomic_write(folder / IDENTITY_NAME, own.identity.encode())
    atomic_write(folder / CA_NAME, own.ca.encode())


def tls_environ(folder: Path) -> dict[str, str]:
    """The variables by which Monarch finds these files."""
    identity = str(folder / IDENTITY_NAME)
    return {
        "HYPERACTOR_TLS_CERT": identity,
        "HYPERACTOR_TLS_KEY": identity,
        "HYPERACTOR_TLS_CA": str(folder / CA_NAME),
    }
