"""CAs that belong to one run, and the certificates that they sign; imported on use, as `cryptography` takes time."""

from __future__ import annotations

from datetime import UTC, datetime
from ipaddress import ip_address

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from msgspec import Struct

_CA_NAME = "the CA of one holdfast run"

# Node clocks may be years off, and a run has no fixed end. _NOT_AFTER is how RFC 5280 (4.1.2.5) writes "never".
_NOT_BEFORE = datetime(2000, 1, 1, tzinfo=UTC)
_NOT_AFTER = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)


class RunAuthority(Struct, frozen=True):
    """A CA with its key."""

    _key: ec.EllipticCurvePrivateKey
    _certificate: x509.Certificate

    @classmethod
    def create(cls) -> RunAuthority:
        """A new CA."""
        key = ec.generate_private_key(ec.SECP256R1())
        return cls(key, _builder(_CA_NAME, key.public_key()).sign(key, SHA256()))

    @classmethod
    def load(cls, pem: bytes) -> RunAuthority:
        """The CA that `private_pem` returned."""
        key = load_pem_private_key(pem, None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return cls(key, x509.load_pem_x509_certificate(pem))

    @property
    def certificate_pem(self) -> bytes:
        """The certificate that peers trust."""
        return self._certificate.public_bytes(Encoding.PEM)

    @property
    def private_pem(self) -> bytes:
        """The key and the certificate."""
        return _private_bytes(self._key) + self.certificate_pem

    def issue_for_server(self, name: str) -> bytes:
        """The key and the certificate of a server with this DNS name, as PEM."""
        return self._issue(name, x509.DNSName(name), x509.ExtendedKeyUsageOID.SERVER_AUTH)

    def issue_for_peer(self, address: str) -> bytes:
        """The same of a process that listens at an IP address, and connects to others."""
        usages = x509.ExtendedKeyUsageOID.SERVER_AUTH, x509.ExtendedKeyUsageOID.CLIENT_AUTH
        return self._issue(address, x509.IPAddress(ip_address(address)), *usages)

    def _issue(self, subject: str, name: x509.GeneralName, *usages: x509.ObjectIdentifier) -> bytes:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            _builder(subject, key.public_key())
            .add_extension(x509.SubjectAlternativeName([name]), critical=False)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, SHA256())
        )
        return _private_bytes(key) + certificate.public_bytes(Encoding.PEM)


def _private_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _builder(subject: str, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    issuer, owner = (x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)]) for text in (_CA_NAME, subject))
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
