"""A stand-in for the API server's token issuer: discovery and keys over TLS, for who shows the pod's own token."""

import datetime
import ipaddress
import json
import secrets
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jwt
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

_DAY = datetime.timedelta(days=1)
TOKEN_LIFE_S = 900


class CertificateAuthority:
    """A small CA that signs server certificates."""

    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._certificate = self._sign(
            self._name, self._key.public_key(), x509.BasicConstraints(ca=True, path_length=0)
        )

    def _sign(self, name: x509.Name, key: Any, *extensions: x509.ExtensionType) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(self._name).public_key(key)
        builder = (
            builder.serial_number(x509.random_serial_number()).not_valid_before(now - _DAY).not_valid_after(now + _DAY)
        )
        for extension in extensions:
            builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        return builder.sign(self._key, hashes.SHA256())

    @property
    def pem(self) -> bytes:
        """The CA's own certificate."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def issue(self, folder: Path, *names: str) -> None:
        """Write tls.crt and tls.key for a server of these DNS names or addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        alternative = x509.SubjectAlternativeName([_general_name(name) for name in names])
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
        certificate = self._sign(subject, key.public_key(), alternative)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tls.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        (folder / "tls.key").write_bytes(_private_pem(key))


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _private_pem(key: Any) -> bytes:
    return bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


class SigningKey:
    """An RSA key with the name that tokens give it."""

    def __init__(self, kid: str) -> None:
        self.kid = kid
        self.private = rsa.generate_private_key(public_exponent=65537, key_size=2048)

    def published(self) -> dict[str, Any]:
        """The public part, as in a key set."""
        public = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(self.private.public_key()))
        return public | {"kid": self.kid, "use": "sig", "alg": "RS256"}


class Issuer:
    """Serves https://127.0.0.1:<port>; close() when done."""

    def __init__(self, folder: Path) -> None:
        authority = CertificateAuthority("test issuer")
        authority.issue(folder, "127.0.0.1")
        self.ca_file = folder / "issuer-ca.crt"
        self.ca_file.write_bytes(authority.pem)
        self.token_file = folder / "pod-token"
        self._pod_token = secrets.token_hex(16)
        self.token_file.write_text(self._pod_token)
        self.key = SigningKey("key-1")
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where it listens, which is also the issuer that tokens name."""
        return f"https://127.0.0.1:{self._server.server_port}"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                documents = {
                    "/.well-known/openid-configuration": {
                        "issuer": issuer.url,
                        "jwks_uri": f"{issuer.url}/openid/v1/jwks",
                    },
                    "/openid/v1/jwks": {"keys": [issuer.key.published()]},
                }
                known = self.headers.get("Authorization") == f"Bearer {issuer._pod_token}"
                body = json.dumps(documents.get(self.path, {})).encode()
                self.send_response(200 if known and self.path in documents else 401)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Quiet."""

        return Handler

    def token(self, *, subject: str, uid: str, audience: str, key: SigningKey | None = None, **changes: Any) -> str:
        """A ServiceAccount token as the API server makes it, apart from the changes; a claim of None is left out."""
        key = key or self.key
        now = int(time.time())
        claims: dict[str, Any] = {
            "iss": self.url,
            "sub": subject,
            "aud": [audience],
            "iat": now,
            "nbf": now,
            "exp": now + TOKEN_LIFE_S,
            "kubernetes.io": {"serviceaccount": {"name": subject.rpartition(":")[2], "uid": uid}},
        } | changes
        claims = {name: value for name, value in claims.items() if value is not None}
        return jwt.encode(claims, key.private, algorithm="RS256", headers={"kid": key.kid})

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
