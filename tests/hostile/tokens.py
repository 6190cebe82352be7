"""Issues JSON Web Tokens, as an identity provider does."""

import base64
import json
import time
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

ISSUER, AUDIENCE = "https://login.example.org", "attnlens"


class Issuer:
    """An issuer with a private key for `algorithm`, RS256 or ES256."""

    def __init__(self, algorithm: str) -> None:
        self.algorithm = algorithm
        self._key = (
            rsa.generate_private_key(65537, 2048)
            if algorithm == "RS256"
            else ec.generate_private_key(ec.SECP256R1())
        )

    def write_public_key(self, path: Path) -> None:
        public = self._key.public_key()
        path.write_bytes(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))

    def token(self, subject: str, *, alg: str | None = None, **claims: object) -> str:
        """Return a token that is valid unless `claims` replaces a claim. A claim of None is left out."""
        all_claims = {"sub": subject, "iss": ISSUER, "aud": AUDIENCE, "exp": int(time.time()) + 60, **claims}
        header = {"alg": alg or self.algorithm, "typ": "JWT"}
        payload = {name: value for name, value in all_claims.items() if value is not None}
        signed = f"{_encode_json(header)}.{_encode_json(payload)}"
        return f"{signed}.{_encode(self._sign(signed.encode()))}"

    def _sign(self, content: bytes) -> bytes:
        if isinstance(self._key, rsa.RSAPrivateKey):
            return self._key.sign(content, padding.PKCS1v15(), SHA256())
        r, s = decode_dss_signature(self._key.sign(content, ec.ECDSA(SHA256())))
        return r.to_bytes(32, "big") + s.to_bytes(32, "big")


def _encode_json(content: dict[str, Any]) -> str:
    return _encode(json.dumps(content).encode())


def _encode(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()
