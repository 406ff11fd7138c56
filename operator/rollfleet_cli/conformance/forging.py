"""Tokens that no guard may take, made of one that it takes: known to nobody but the engine that is asked."""

import base64
import hmac
import json
from typing import Any

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from rollfleet_cli.conformance.checks.wire import Identity

EVERYBODY_KNOWS = b"known to everybody known to everybody"
LATER_S = 10**6
P256_BYTES = 32


def forged(token: str) -> dict[Identity, str]:
    """One of each kind; the key is forged in the algorithm that the token names."""
    head, claims, signature = token.split(".")
    header, payload = _read(head), _read(claims)
    return {
        Identity.GARBAGE: "not.a.token",
        Identity.ALG_NONE: f"{_write(header | {'alg': 'none'})}.{claims}.",
        Identity.SHARED_SECRET: _by_secret(header | {"alg": "HS256"}, claims),
        Identity.FORGED_KEY: _by_other_key(head, header, claims),
        Identity.CHANGED_CLAIMS: f"{head}.{_write(payload | {'exp': payload['exp'] + LATER_S})}.{signature}",
    }


def _by_secret(header: dict[str, Any], claims: str) -> str:
    signed = f"{_write(header)}.{claims}"
    return f"{signed}.{_text(hmac.digest(EVERYBODY_KNOWS, signed.encode(), 'sha256'))}"


def _by_other_key(head: str, header: dict[str, Any], claims: str) -> str:
    signed = f"{head}.{claims}"
    if header.get("alg") == "ES256":
        made = ec.generate_private_key(ec.SECP256R1()).sign(signed.encode(), ec.ECDSA(hashes.SHA256()))
        signature = b"".join(number.to_bytes(P256_BYTES, "big") for number in decode_dss_signature(made))
    else:
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        signature = key.sign(signed.encode(), padding.PKCS1v15(), hashes.SHA256())
    return f"{signed}.{_text(signature)}"


def _read(part: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    return document


def _write(document: dict[str, Any]) -> str:
    return _text(json.dumps(document, separators=(",", ":")).encode())


def _text(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()
