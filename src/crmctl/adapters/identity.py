"""Who the actor is: a signed token (JWT), checked against the keys, issuer and audience of the settings.

The signature is checked before a transaction begins, since fetching keys can be slow; the token's time is
checked in it, against PostgreSQL's clock. No message quotes any part of a token.
"""

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from threading import Thread
from typing import Any, Final
from urllib.parse import urlsplit
from uuid import UUID

import jwt

from crmctl.domain.errors import BookingForbiddenError, ConfigurationError, UnavailableError
from crmctl.settings import AuthSettings

_LEEWAY: Final = timedelta(seconds=60)
_KEYS_TIMEOUT_SECONDS: Final = 5
_LONGEST_TOKEN: Final = 16_384
_LONGEST_SUBJECT: Final = 500
_CLAIMS: Final = ("iss", "aud", "exp", "sub", "developer_company_id", "permissions")


@dataclass(frozen=True, slots=True)
class Actor:
    """Whom a token speaks for. `tenant_id` is the developer company that the actor works for."""

    subject: str
    tenant_id: UUID
    permissions: frozenset[str]
    not_before: datetime | None
    expires_at: datetime

    def check_time(self, now: datetime) -> None:
        """Raise BookingForbiddenError unless the token is valid at `now`, give or take a minute."""
        if now - self.expires_at >= _LEEWAY:
            raise _refused(f"it expired at {self.expires_at.isoformat()}")
        if self.not_before is not None and self.not_before - now > _LEEWAY:
            raise _refused(f"it is not valid before {self.not_before.isoformat()}")


def authenticate(token: str | None, settings: AuthSettings) -> Actor:
    """Check a token's signature and claims; its time is left to `Actor.check_time`.

    Raises BookingForbiddenError for a token that is missing or not to be believed, ConfigurationError when no
    keys, issuer or audience are configured, UnavailableError when a JWKS URL does not answer within 5 s.
    """
    key_for = _keys(settings)
    if not settings.issuer or not settings.audience:
        raise ConfigurationError(
            "no issuer or no audience is configured, so no token can be believed",
            hint="set CRMCTL_AUTH__ISSUER and CRMCTL_AUTH__AUDIENCE",
        )
    if not token:
        raise _refused(
            "there is none", hint="put it into CRMCTL_ACTOR_TOKEN, or name its file in CRMCTL_ACTOR_TOKEN_FILE"
        )
    if len(token) > _LONGEST_TOKEN:
        raise _refused(f"it is longer than {_LONGEST_TOKEN} bytes")
    try:
        claims: dict[str, Any] = jwt.decode(
            token,
            key_for(token),
            algorithms=[settings.algorithm],
            issuer=settings.issuer,
            audience=settings.audience,
            options={"require": list(_CLAIMS), "verify_exp": False, "verify_nbf": False, "verify_iat": False},
        )
    except (jwt.PyJWTError, TypeError, ValueError) as error:
        raise _refused(_REASONS.get(type(error), "it is malformed")) from None
    return _actor(claims)


def _actor(claims: dict[str, Any]) -> Actor:
    subject, permissions = claims["sub"], claims["permissions"]
    if not isinstance(subject, str) or not subject.isprintable() or not 0 < len(subject) <= _LONGEST_SUBJECT:
        raise _refused(f"its sub is no printable text of 1 to {_LONGEST_SUBJECT} characters")
    if not isinstance(permissions, list) or not all(isinstance(name, str) for name in permissions):
        raise _refused("its permissions are no list of texts")
    try:
        return Actor(
            subject=subject,
            tenant_id=UUID(claims["developer_company_id"]),
            permissions=frozenset(permissions),
            not_before=None if claims.get("nbf") is None else _instant(claims["nbf"]),
            expires_at=_instant(claims["exp"]),
        )
    except (ValueError, TypeError, AttributeError, OverflowError, OSError):
        raise _refused("its developer_company_id, exp or nbf is malformed") from None


def _instant(seconds: object) -> datetime:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError
    return datetime.fromtimestamp(seconds, UTC)


_REASONS: Final[dict[type[Exception], str]] = {
    jwt.InvalidAlgorithmError: "it is not signed with the configured algorithm",
    jwt.InvalidSignatureError: "its signature is not by a key that is trusted here",
    jwt.InvalidIssuerError: "its issuer is not the configured one",
    jwt.InvalidAudienceError: "it is not meant for the configured audience",
    jwt.MissingRequiredClaimError: f"it lacks one of {', '.join(_CLAIMS)}",
    jwt.PyJWKClientError: "no trusted key has its key id",
    jwt.PyJWKSetError: "no trusted key has its key id",
    jwt.InvalidKeyError: "its algorithm does not fit the trusted key",
}


def _refused(reason: str, hint: str | None = None) -> BookingForbiddenError:
    return BookingForbiddenError(
        f"the actor's token is refused: {reason}", hint=hint or "get a new token, and try again"
    )


def _keys(settings: AuthSettings) -> Callable[[str], Any]:
    """How to find the key for a token: the one public key, or by key id in a JWKS."""
    sources = [name for name in ("public_key", "jwks", "jwks_url") if getattr(settings, name)]
    if len(sources) != 1:
        raise ConfigurationError(
            "no public key is configured, so no token can be believed"
            if not sources
            else f"several sources of keys are configured: {', '.join(sources)}",
            hint="set one of CRMCTL_AUTH__PUBLIC_KEY, CRMCTL_AUTH__JWKS (or …_FILE), CRMCTL_AUTH__JWKS_URL",
        )
    if settings.public_key:
        return _public_key(settings.public_key, settings.algorithm)
    if settings.jwks:
        try:
            key_set = jwt.PyJWKSet.from_json(settings.jwks)
        except (jwt.PyJWTError, ValueError, TypeError, AttributeError):
            raise ConfigurationError("CRMCTL_AUTH__JWKS is no JWKS document") from None
        keys = _signing_keys(key_set, "CRMCTL_AUTH__JWKS")
        return lambda token: _by_key_id(keys, token)
    return _from_url(settings.jwks_url or "")


def _public_key(pem: str, algorithm: str) -> Callable[[str], Any]:
    try:
        key = jwt.get_algorithm_by_name(algorithm).prepare_key(pem.replace("\\n", "\n"))
    except (jwt.PyJWTError, ValueError, TypeError):
        raise ConfigurationError(f"CRMCTL_AUTH__PUBLIC_KEY is no public key for {algorithm} in PEM form") from None
    if not hasattr(key, "public_bytes"):
        raise ConfigurationError("CRMCTL_AUTH__PUBLIC_KEY holds a private key", hint="configure its public half only")
    return lambda _token: key


def _signing_keys(key_set: jwt.PyJWKSet, setting: str) -> list[jwt.PyJWK]:
    """The keys that are meant for signatures. Raises ConfigurationError if any key of the set is private."""
    if any(hasattr(key.key, "private_bytes") for key in key_set.keys):
        raise ConfigurationError(f"{setting} holds a private key", hint="configure the public halves only")
    return [key for key in key_set.keys if key.public_key_use in (None, "sig")]


def _by_key_id(keys: list[jwt.PyJWK], token: str) -> Any:
    key_id = jwt.get_unverified_header(token).get("kid")
    if key_id is None and len(keys) == 1:
        return keys[0].key
    for key in keys:
        if key.key_id == key_id and key_id is not None:
            return key.key
    raise jwt.PyJWKSetError("no such key")


def _from_url(url: str) -> Callable[[str], Any]:
    parts = urlsplit(url)
    if parts.scheme != "https" and not (parts.scheme == "http" and _is_loopback(parts.hostname)):
        raise ConfigurationError("CRMCTL_AUTH__JWKS_URL must be an https URL")
    client = jwt.PyJWKClient(url, timeout=_KEYS_TIMEOUT_SECONDS, cache_keys=False)

    def key_for(token: str) -> Any:
        # The client's own timeout is for each read; a server that answers drop by drop must not hold us up.
        outcome: list[Any] = []
        thread = Thread(target=lambda: outcome.append(_fetch(client)), name="jwks", daemon=True)
        thread.start()
        thread.join(_KEYS_TIMEOUT_SECONDS)
        if not outcome or isinstance(outcome[0], jwt.PyJWKClientConnectionError | OSError):
            raise UnavailableError(
                f"the keys at {parts.hostname} could not be fetched in {_KEYS_TIMEOUT_SECONDS} s",
                hint="check CRMCTL_AUTH__JWKS_URL",
            )
        if isinstance(outcome[0], Exception):
            raise ConfigurationError("CRMCTL_AUTH__JWKS_URL answers with no JWKS document")
        return _by_key_id(_signing_keys(outcome[0], "CRMCTL_AUTH__JWKS_URL"), token)

    return key_for


def _fetch(client: jwt.PyJWKClient) -> jwt.PyJWKSet | Exception:
    try:
        return client.get_jwk_set()
    except Exception as error:  # whatever the server made of it, the caller explains it
        return error


def _is_loopback(host: str | None) -> bool:
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False
