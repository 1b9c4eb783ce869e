"""A lab's keys and certificates: one authority for everything in it, and the administrator's token."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

_Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey
_PEM = Encoding.PEM
_LIFE = timedelta(days=3650)

# An operator that renews certificates looks for its own name in the authority's certificate, and for its service's name
# in the serving certificate. If it finds both, it leaves them alone.
_AUTHORITIES = ("kueue-ca", "training-operator-ca")
_SERVICES = (
    "localhost",
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kueue-webhook-service.kueue-system.svc",
    "jobset-webhook-service.jobset-system.svc",
    "kubeflow-trainer-controller-manager.kubeflow-system.svc",
    "training-operator.kubeflow.svc",
)


def make_pki(folder: Path) -> None:
    """Write a lab's keys and certificates to a folder that does not exist yet.

    - ca.crt, ca.key: the authority
    - tls.crt, tls.key: serving certificate of all programs
    - kubelet-client.crt, .key: the API server's client certificate for kubelets
    - sa.key, sa.pub: signing keys of tokens
    - token, tokens.csv: the administrator's token
    """
    folder.mkdir(mode=0o700)
    # The operators that renew certificates only read RSA keys in PKCS#1.
    ca_key = rsa.generate_private_key(65537, 2048)
    ca_name = _name("lab-ca")
    ca = _certificate(ca_name, ca_name, ca_key, ca_key, names=_AUTHORITIES, authority=True)
    _write(folder, "ca", ca_key, ca)

    key = ec.generate_private_key(ec.SECP256R1())
    serving = _certificate(_name("lab"), ca_name, key, ca_key, names=_SERVICES, purpose="server")
    _write(folder, "tls", key, serving)

    key = ec.generate_private_key(ec.SECP256R1())
    client = _certificate(_name("kube-apiserver", "system:masters"), ca_name, key, ca_key, purpose="client")
    _write(folder, "kubelet-client", key, client)

    signer = rsa.generate_private_key(65537, 2048)
    (folder / "sa.key").write_bytes(_pem(signer))
    (folder / "sa.pub").write_bytes(signer.public_key().public_bytes(_PEM, PublicFormat.SubjectPublicKeyInfo))

    token = secrets.token_hex(16)
    (folder / "token").write_text(token)
    (folder / "tokens.csv").write_text(f'{token},admin,admin,"system:masters"\n')


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: _Key,
    issuer_key: rsa.RSAPrivateKey,
    *,
    names: tuple[str, ...] = (),
    authority: bool = False,
    purpose: str = "",
) -> x509.Certificate:
    now = datetime.now(UTC)
    usage = x509.KeyUsage(
        digital_signature=True,
        key_encipherment=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + _LIFE)
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )
    if names:
        alternatives: list[x509.GeneralName] = [x509.DNSName(name) for name in names]
        if purpose:
            alternatives.append(x509.IPAddress(IPv4Address("127.0.0.1")))
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    if purpose:
        oids = {"server": x509.ExtendedKeyUsageOID.SERVER_AUTH, "client": x509.ExtendedKeyUsageOID.CLIENT_AUTH}
        builder = builder.add_extension(x509.ExtendedKeyUsage([oids[purpose]]), critical=False)
    return builder.sign(issuer_key, SHA256())


def _name(common: str, organization: str = "lab") -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(x509.NameOID.ORGANIZATION_NAME, organization),
            x509.NameAttribute(x509.NameOID.COMMON_NAME, common),
        ]
    )


def _pem(key: _Key) -> bytes:
    return key.private_bytes(_PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())


def _write(folder: Path, name: str, key: _Key, certificate: x509.Certificate) -> None:
    (folder / f"{name}.key").write_bytes(_pem(key))
    (folder / f"{name}.crt").write_bytes(certificate.public_bytes(_PEM))
