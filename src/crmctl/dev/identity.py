"""The embedded environment's own issuer of tokens: a key that nothing else trusts."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final
from uuid import UUID

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from crmctl.dev.postgres import write_private
from crmctl.domain.errors import ConfigurationError

ISSUER: Final = "crmctl-dev"
AUDIENCE: Final = "crmctl"
ALGORITHM: Final = "EdDSA"


def ensure_key(file: Path) -> str:
    """Make the private key in `file` (mode 0600) unless it is there; return the public key in PEM form."""
    if not file.exists():
        key = Ed25519PrivateKey.generate()
        private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        write_private(file, key.private_bytes(serialization.Encoding.PEM, *private).decode())
    return (
        _private_key(file)
        .public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        .decode()
    )


def issue(file: Path, *, tenant_id: UUID, subject: str, permissions: list[str], ttl: timedelta) -> str:
    """Sign a token with the key in `file`. Raises ConfigurationError where there is none."""
    now = datetime.now(UTC)
    claims = {
        "iss": ISSUER,
        "aud": AUDIENCE,
        "sub": subject,
        "exp": now + ttl,
        "developer_company_id": str(tenant_id),
        "permissions": permissions,
    }
    return jwt.encode(claims, _private_key(file), algorithm=ALGORITHM)


def _private_key(file: Path) -> Ed25519PrivateKey:
    try:
        key = serialization.load_pem_private_key(file.read_bytes(), password=None)
    except FileNotFoundError:
        raise ConfigurationError("no embedded environment runs here", hint="start one with: crmctl dev up") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigurationError(f"{file} holds no Ed25519 key", hint="remove it, then run: crmctl dev up")
    return key
