"""The operator's own small CA and the certificates of the control ports. The only place that reads private keys.

ECDSA P-256 throughout. The CA lives in Secret `rollfleet-ca` of the operator's namespace for 10 years; a fleet's
certificate lives in Secret `<fleet>-engine-tls` for 90 days and is made anew after 60.

The CA is made anew after two thirds of its life, or where a person asks for it by the annotation ROTATE. The one before
is trusted beside it for as long as a certificate of its can live, so that engines may take their new one when the
kubelet brings it; `status.caBundle` carries both meanwhile. That time is each CA's own, however many were made since.
"""

import asyncio
import base64
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from rollfleet_operator.api.meta import API_VERSION, LABEL_COMPONENT, LABEL_FLEET
from rollfleet_operator.api.rolloutengine import RolloutEngine
from rollfleet_operator.clients.errors import AlreadyExists, InvalidSpec, NotFound, Unreachable
from rollfleet_operator.ports import SECRETS, Cluster, Manifest
from rollfleet_protocol.engine_config import FleetIdentity

logger = logging.getLogger(__name__)

ROTATE = "rollfleet.io/rotate"  # annotation of the CA's Secret; any value, taken off when it is done
MOST_BEFORE = 3  # CAs that are trusted beside the newest, however often one is asked for
CA_SECRET = "rollfleet-ca"  # noqa: S105 - a name
CA_LIFE = timedelta(days=3650)
FLEET_LIFE = timedelta(days=90)
BACKDATED = timedelta(minutes=5)  # for engines whose clock is behind ours
RENEW_AT = 2 / 3  # of a certificate's life
TLS = "kubernetes.io/tls"
USES = (
    "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
    "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
)  # fmt: skip
# What reading certificates and keys raises that somebody else has put into a Secret.
_UNREADABLE = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    InvalidSignature,
    x509.ExtensionNotFound,
    x509.DuplicateExtension,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)


@dataclass(frozen=True)
class Authority:
    """A certificate that signs others, and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey = field(repr=False)
    before: tuple[x509.Certificate, ...] = ()  # that signed what engines may still show

    @property
    def pem(self) -> str:
        """The certificate alone."""
        return _pem(self.certificate)

    @property
    def trusted(self) -> str:
        """All that prove an engine, PEM, the newest first."""
        return "".join(_pem(each) for each in (self.certificate, *self.before))

    @property
    def bundle(self) -> str:
        """The same as status.caBundle carries it."""
        return base64.b64encode(self.trusted.encode()).decode()


@dataclass(frozen=True)
class Issued:
    """A certificate for a fleet, and its key, both PEM."""

    certificate: bytes
    key: bytes = field(repr=False)


def make_authority(now: datetime) -> Authority:
    """A new self-signed CA."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "rollfleet operator CA")])
    ski = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = (
        _builder(name, name, key.public_key(), now, CA_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage("key_cert_sign", "crl_sign"), critical=True)
        .add_extension(ski, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(ski), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Authority(certificate, key)


def issue(authority: Authority, server_name: str, now: datetime) -> Issued:
    """A server certificate for the control ports of one fleet."""
    key = ec.generate_private_key(ec.SECP256R1())
    issuer_ski = authority.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    subject = x509.Name([])  # a common name holds 64 characters, too few; the name is in subjectAltName, then critical
    certificate = (
        _builder(subject, authority.certificate.subject, key.public_key(), now, FLEET_LIFE)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage("digital_signature"), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(server_name)]), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer_ski), critical=False)
        .sign(authority.key, hashes.SHA256())
    )
    return Issued(certificate.public_bytes(serialization.Encoding.PEM), _private_pem(key))


def why_renew(authority: Authority, secret: Manifest, server_name: str, now: datetime) -> str | None:
    """Why a fleet's Secret needs another certificate; None where it does not."""
    data = secret.get("data") or {}
    if not all(data.get(name) for name in ("tls.crt", "tls.key", "ca.crt")):
        return "a part of it is missing"
    try:
        certificate = x509.load_pem_x509_certificate(base64.b64decode(data["tls.crt"]))
        key = serialization.load_pem_private_key(base64.b64decode(data["tls.key"]), None)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        certificate.verify_directly_issued_by(authority.certificate)
    except _UNREADABLE as error:
        return f"it does not hold ({type(error).__name__})"
    if key.public_key() != certificate.public_key():
        return "its key is another certificate's"
    if base64.b64decode(data["ca.crt"]) != authority.pem.encode():
        return "its ca.crt is another CA's"
    if names.get_values_for_type(x509.DNSName) != [server_name]:
        return "it names another server"
    return "two thirds of its life are over" if now >= renewal_time(certificate) else None


def renewal_time(certificate: x509.Certificate) -> datetime:
    """When a certificate is to be replaced."""
    life = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    return certificate.not_valid_before_utc + life * RENEW_AT


class Certificates:
    """The operator's CA, and what it signs."""

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        clock: Callable[[], datetime],
        trust: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._clock = clock
        self._trust = trust  # told what proves engines (PEM) before any of them can show a certificate of a new CA
        self._authority: Authority | None = None
        self._is_recent = False
        self._reading = asyncio.Lock()
        self._checked: dict[str, datetime] = {}  # fleet's uid -> when its certificate is to be replaced

    async def authority(self) -> Authority:
        """The CA: what the Secret holds, else a new one. Whoever creates the Secret first has made the CA."""
        if self._authority is None:
            self._authority = self._read(await self._secret())
        return self._authority

    async def _current(self) -> Authority:
        """The CA as its Secret holds it, read again after each recheck, and made anew where it is time."""
        async with self._reading:
            if self._authority is None or not self._is_recent:
                self._take(await self._renewed())
                self._is_recent = True
            return await self.authority()

    async def _renewed(self) -> Authority:
        secret = await self._secret()
        try:
            authority = self._read(secret)
        except InvalidSpec as error:
            if self._authority is None:
                raise
            logger.warning("%s; going on with the CA that was read before", error)
            return self._authority
        why = _why_rotate(secret, authority, self._clock())
        if why is None:
            return authority
        logger.warning("a new CA is made: %s", why)
        return self._read(await self._rotate(secret, authority))

    def _take(self, authority: Authority) -> None:
        if self._authority is None or authority.pem != self._authority.pem:
            self._checked.clear()
        self._authority = authority
        self._trust(authority.trusted)

    def _read(self, secret: Manifest) -> Authority:
        return _authority_of(secret, f"{self._namespace}/{CA_SECRET}", self._clock())

    async def _secret(self) -> Manifest:
        try:
            return await self._cluster.get(SECRETS, self._namespace, CA_SECRET)
        except NotFound:
            return await self._create_authority()

    async def _rotate(self, secret: Manifest, old: Authority) -> Manifest:
        """One write, if nobody else has written since."""
        made = make_authority(self._clock())
        new = Authority(made.certificate, made.key, (old.certificate, *old.before)[:MOST_BEFORE])
        written = _tls_secret({}, Issued(new.pem.encode(), _private_pem(new.key)), new.trusted)
        metadata = {"resourceVersion": secret["metadata"]["resourceVersion"], "annotations": {ROTATE: None}}
        patch = {"metadata": metadata, "data": written["data"]}
        return await self._cluster.merge_patch(SECRETS, self._namespace, CA_SECRET, patch)

    async def ensure(self, fleet: RolloutEngine) -> str:
        """See that the fleet has a valid certificate; the CA bundle that proves it."""
        authority, now = await self._current(), self._clock()
        due = self._checked.get(fleet.metadata.uid)
        if due is None or now >= due:
            self._checked[fleet.metadata.uid] = await self._ensure_secret(authority, fleet, now)
        return authority.bundle

    def recheck(self, live_fleets: set[str]) -> None:
        """Look at every Secret again in the next passes, the CA's too; forget fleets (by uid) that are gone."""
        self._is_recent = False
        self._checked = {
            uid: datetime.min.replace(tzinfo=due.tzinfo) for uid, due in self._checked.items() if uid in live_fleets
        }

    async def _create_authority(self) -> Manifest:
        made = make_authority(self._clock())
        metadata = {"name": CA_SECRET, "namespace": self._namespace, "labels": {LABEL_COMPONENT: "ca"}}
        manifest = _tls_secret(metadata, Issued(made.pem.encode(), _private_pem(made.key)), made.pem)
        try:
            return await self._cluster.create(SECRETS, self._namespace, manifest)
        except AlreadyExists:
            return await self._cluster.get(SECRETS, self._namespace, CA_SECRET)

    async def _ensure_secret(self, authority: Authority, fleet: RolloutEngine, now: datetime) -> datetime:
        namespace, name = fleet.metadata.namespace, f"{fleet.metadata.name}-engine-tls"
        server_name = FleetIdentity(
            namespace=namespace, name=fleet.metadata.name, uid=fleet.metadata.uid
        ).control_server_name
        try:
            secret = await self._cluster.get(SECRETS, namespace, name)
            _demand_ours(secret, fleet)
            if why_renew(authority, secret, server_name, now) is None:
                return renewal_time(x509.load_pem_x509_certificate(base64.b64decode(secret["data"]["tls.crt"])))
        except NotFound:
            pass
        issued = issue(authority, server_name, now)
        await self._cluster.apply(SECRETS, namespace, _tls_secret(_fleet_metadata(fleet, name), issued, authority.pem))
        return renewal_time(x509.load_pem_x509_certificate(issued.certificate))


def _demand_ours(secret: Manifest, fleet: RolloutEngine) -> None:
    """Refuse to overwrite somebody else's Secret; wait for one of a deleted fleet of the same name."""
    owners = [
        owner for owner in secret["metadata"].get("ownerReferences") or () if owner.get("kind") == "RolloutEngine"
    ]
    where = f"Secret {fleet.metadata.namespace}/{secret['metadata']['name']}"
    if not owners:
        raise InvalidSpec(f"{where} is not the operator's: delete it, or give the fleet another name")
    if all(owner.get("uid") != fleet.metadata.uid for owner in owners):
        raise Unreachable(f"{where} belongs to a deleted fleet of this name, and is not collected yet")


def _fleet_metadata(fleet: RolloutEngine, name: str) -> Manifest:
    owner = {"apiVersion": API_VERSION, "kind": "RolloutEngine", "name": fleet.metadata.name, "uid": fleet.metadata.uid}
    labels = {LABEL_FLEET: fleet.metadata.name, LABEL_COMPONENT: "engine"}
    owners = [owner | {"controller": True, "blockOwnerDeletion": False}]
    return {"name": name, "namespace": fleet.metadata.namespace, "labels": labels, "ownerReferences": owners}


def _tls_secret(metadata: Manifest, issued: Issued, ca_pem: str) -> Manifest:
    parts = {"tls.crt": issued.certificate, "tls.key": issued.key, "ca.crt": ca_pem.encode()}
    data = {name: base64.b64encode(content).decode() for name, content in parts.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": TLS, "data": data}


def _why_rotate(secret: Manifest, authority: Authority, now: datetime) -> str | None:
    if ROTATE in (secret["metadata"].get("annotations") or {}):
        return f"annotation {ROTATE} asks for it"
    return "two thirds of its life are over" if now >= renewal_time(authority.certificate) else None


def _before(secret: Manifest, newest: x509.Certificate, now: datetime) -> tuple[x509.Certificate, ...]:
    """The CAs whose certificates engines may still show: none lives longer than FLEET_LIFE after the next CA began."""
    try:
        known = x509.load_pem_x509_certificates(base64.b64decode(secret["data"].get("ca.crt", "")))
    except ValueError:  # what is trusted besides is lost, the CA is not
        return ()
    ordered = [newest, *(each for each in known if each != newest)]  # the newest first
    ends = (
        min(each.not_valid_after_utc, _end_before(following))
        for each, following in zip(ordered[1:], ordered, strict=False)
    )
    return tuple(each for each, end in zip(ordered[1:], ends, strict=True) if now <= end)[:MOST_BEFORE]


def _end_before(ca: x509.Certificate) -> datetime:
    """When the last certificate ends that the CA before this one has signed."""
    return ca.not_valid_before_utc + BACKDATED + FLEET_LIFE


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _authority_of(secret: Manifest, where: str, now: datetime) -> Authority:
    try:
        certificate = x509.load_pem_x509_certificate(base64.b64decode(secret["data"]["tls.crt"]))
        key = serialization.load_pem_private_key(base64.b64decode(secret["data"]["tls.key"]), None)
        before = _before(secret, certificate, now)
    except (KeyError, *_UNREADABLE) as error:
        raise InvalidSpec(
            f"Secret {where} holds no CA ({type(error).__name__}): delete it to have a new one made"
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise InvalidSpec(f"Secret {where}: tls.key is not the P-256 key of tls.crt: delete it to have a new one made")
    return Authority(certificate, key, before)


def _usage(*allowed: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{use: use in allowed for use in USES})


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, life: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + life)
    )


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
