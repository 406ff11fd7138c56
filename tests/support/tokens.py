"""ServiceAccount tokens as an API server signs them, and the API server's two documents about them."""

import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from tests.support.guards import FLEET, OPERATOR

ISSUER = "https://kubernetes.default.svc.cluster.local"
SigningKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey


def rsa_key() -> rsa.RSAPrivateKey:
    """2048 bits, as kubeadm makes them."""
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def ec_key() -> ec.EllipticCurvePrivateKey:
    """P-256."""
    return ec.generate_private_key(ec.SECP256R1())


def claims(**changes: Any) -> dict[str, Any]:
    """The operator's claims for the fleet, good for ten minutes; a change to None leaves the claim out."""
    now = int(time.time())
    full = {
        "iss": ISSUER,
        "aud": [FLEET.audience("")],
        "sub": OPERATOR.subject,
        "iat": now,
        "nbf": now,
        "exp": now + 600,
        "kubernetes.io": {
            "namespace": "rollfleet",
            "serviceaccount": {"name": "rollfleet-operator", "uid": OPERATOR.uid},
        },
    } | changes
    return {name: value for name, value in full.items() if value is not None}


def sign(key: SigningKey, kid: str | None = "first", algorithm: str | None = None, **changes: Any) -> str:
    """A token."""
    chosen = algorithm or ("RS256" if isinstance(key, rsa.RSAPrivateKey) else "ES256")
    return jwt.encode(claims(**changes), key, chosen, headers={} if kid is None else {"kid": kid})


class ApiServer:
    """Answers for discovery and keys, as an httpx transport; `keys` may be changed, `error` raised."""

    def __init__(self, **keys: SigningKey) -> None:
        self.keys = keys
        self.asked: list[str] = []
        self.tokens: set[str] = set()
        self.error: Exception | None = None
        self.documents: dict[str, httpx.Response] = {}
        self.date: Callable[[], str] | None = None

    def transport(self) -> httpx.MockTransport:
        """For httpx.AsyncClient."""
        return httpx.MockTransport(self._answer)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url.path)
        self.tokens.add(request.headers["authorization"])
        if self.error is not None:
            raise self.error
        if request.url.path in self.documents:
            return self.documents[request.url.path]
        if request.url.path == "/.well-known/openid-configuration":
            return httpx.Response(200, json={"issuer": ISSUER, "jwks_uri": "https://elsewhere/openid/v1/jwks"})
        headers = {} if self.date is None else {"date": self.date()}
        published = {"keys": [self._jwk(kid, key) for kid, key in self.keys.items()]}
        return httpx.Response(200, headers=headers, json=published)

    @staticmethod
    def _jwk(kid: str, key: SigningKey) -> dict[str, Any]:
        if isinstance(key, rsa.RSAPrivateKey):
            return json.loads(RSAAlgorithm.to_jwk(key.public_key())) | {"kid": kid, "alg": "RS256", "use": "sig"}
        return json.loads(ECAlgorithm.to_jwk(key.public_key())) | {"kid": kid, "alg": "ES256", "use": "sig"}
