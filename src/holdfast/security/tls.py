"""TLS identity of a controller on a network: a certificate under a CA that belongs to one run.

The CA's key signs one certificate and is discarded, so no further certificate can be issued; a restarted controller
reuses the same one. Agents receive the CA and trust nothing else. They authenticate with tokens (tokens.py).
"""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path

from holdfast.host.files import atomic_write

CONTROLLER_NAME = "controller.holdfast"
"""The name in the certificate, which agents verify: it does not depend on where the controller listens."""

_CA_NAME = "the CA of one holdfast run"

# Node clocks may be years off, and a run has no fixed end. _NOT_AFTER is how RFC 5280 (4.1.2.5) writes "never".
_NOT_BEFORE = datetime(2000, 1, 1, tzinfo=UTC)
_NOT_AFTER = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)


def is_remote(host: str) -> bool:
    """Whether other machines may see the traffic of a listener at this address."""
    return not ip_address(host).is_loopback


def make_identity(ca: Path, identity: Path) -> None:
    """Write a CA certificate, and a controller's certificate with its key, as private files."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    def certificate(subject: str, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        issuer, owner = (
            x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)]) for text in (_CA_NAME, subject)
        )
        is_ca = issuer == owner
        usage = x509.KeyUsage(
            digital_signature=not is_ca,
            key_cert_sign=is_ca,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            crl_sign=False,
            encipher_only=False,
            decipher_only=False,
        )
        return (
            x509.CertificateBuilder()
            .issuer_name(issuer)
            .subject_name(owner)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(_NOT_BEFORE)
            .not_valid_after(_NOT_AFTER)
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        )

    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    root = certificate(_CA_NAME, ca_key.public_key()).sign(ca_key, SHA256())
    leaf = (
        certificate(CONTROLLER_NAME, key.public_key())
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(CONTROLLER_NAME)]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, SHA256())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    # Write the identity last: if it exists, its CA exists.
    atomic_write(ca, root.public_bytes(Encoding.PEM))
    atomic_write(identity, private + leaf.public_bytes(Encoding.PEM))


def server_context(identity: Path) -> ssl.SSLContext:
    """The controller's TLS context."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(identity)
    return context


def client_context(ca: Path) -> ssl.SSLContext:
    """The agents' TLS context: accepts only a certificate for `CONTROLLER_NAME` that this CA signed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(ca)
    return context
