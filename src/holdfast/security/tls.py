"""TLS identity of a controller on a network: a certificate under a CA that belongs to one run.

The CA's key signs one certificate and is discarded, so no further certificate can be issued; a restarted controller
reuses the same one. Agents receive the CA and trust nothing else. They authenticate with tokens (tokens.py).
"""

from __future__ import annotations

import ssl
from ipaddress import ip_address
from pathlib import Path

from holdfast.host.files import atomic_write

CONTROLLER_NAME = "controller.holdfast"
"""The name in the certificate, which agents verify: it does not depend on where the controller listens."""


def is_remote(host: str) -> bool:
    """Whether other machines may see the traffic of a listener at this address."""
    return not ip_address(host).is_loopback


def make_identity(ca: Path, identity: Path) -> None:
    """Write a CA certificate, and a controller's certificate with its key, as private files."""
    from holdfast.security.certificates import RunAuthority

    authority = RunAuthority.create()
    # Write the identity last: if it exists, its CA exists.
    atomic_write(ca, authority.certificate_pem)
    atomic_write(identity, authority.issue_for_server(CONTROLLER_NAME))


def server_context(identity: Path) -> ssl.SSLContext:
    """The controller's TLS context."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(identity)
    return context


def client_context(ca: Path | None) -> ssl.SSLContext:
    """The agents' TLS context: accepts only a certificate for `CONTROLLER_NAME` that this CA signed.

    Without a CA it accepts none: a connection that needs no TLS saves the 20 ms in which Python's own context reads the
    machine's certificates.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if ca is not None:
        context.load_verify_locations(ca)
    return context
