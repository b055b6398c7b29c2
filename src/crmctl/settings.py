"""Settings: environment over secret files over crmctl.toml over the embedded environment's address.

Every name is `CRMCTL_…` in the environment, nested with `__`; the same name in lower case, without the
prefix, in crmctl.toml. A secret may come from a file: `CRMCTL_DATABASE_URL_FILE=/path`, or a file called
`crmctl_database_url` (any case) in `/run/secrets` (`CRMCTL_SECRETS_DIR`).
"""

import os
import tomllib
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from crmctl.domain.errors import ConfigurationError
from crmctl.domain.times import parse_duration

_PREFIX: Final = "CRMCTL_"
_DEV_FILE: Final = Path(".crmctl") / "dev.toml"


def _duration(value: object) -> object:
    return parse_duration(value) if isinstance(value, str) else value


Duration = Annotated[timedelta, BeforeValidator(_duration), Field(gt=timedelta(0))]


class DatabaseSettings(BaseModel):
    """The guards of every session, and how patient a run is."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    connect_timeout: Duration = timedelta(seconds=10)
    statement_timeout: Duration = timedelta(seconds=30)
    lock_timeout: Duration = timedelta(seconds=5)
    idle_in_transaction_timeout: Duration = timedelta(seconds=30)
    transaction_attempts: int = Field(default=5, ge=1, le=100)
    role_prefix: str = Field(default="crmctl_", min_length=1, max_length=32)


class AuthSettings(BaseModel):
    """Whose tokens `bookings extend` believes: the issuer, the audience, and one source of public keys.

    Only asymmetric algorithms are accepted, and just the one that is named: no token chooses its own.
    """

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    issuer: str | None = None
    audience: str | None = None
    algorithm: Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"] = (
        "RS256"
    )
    public_key: str | None = None
    jwks: str | None = None
    jwks_url: str | None = None


class KafkaSettings(BaseModel):
    """How to reach Kafka. `options` are librdkafka properties that are added last."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    bootstrap_servers: str | None = None
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_SSL"] = "PLAINTEXT"
    sasl_mechanism: Literal["SCRAM-SHA-256", "SCRAM-SHA-512"] = "SCRAM-SHA-512"
    sasl_username: str | None = None
    sasl_password: SecretStr | None = None
    ssl_ca_location: Path | None = None
    ssl_certificate_location: Path | None = None
    ssl_key_location: Path | None = None
    ssl_key_password: SecretStr | None = None
    options: dict[str, str] = {}


class ChatStatusSettings(BaseModel):
    """The deal-chat-status consumer: its topics, its group, and where it answers to Prometheus and probes."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    topic: str = "pin.messenger.deal-chat-status-changed.v1"
    dlq_topic: str = "pin.crm.deal-chat-status-dlq.v1"
    group: str = "pin-crm-deal-chat-status"
    dlq_group: str = "pin-crm-deal-chat-status-dlq"
    group_instance_id: str | None = None
    metrics_host: str = "0.0.0.0"  # noqa: S104  a pod's probes and Prometheus come from outside it
    metrics_port: int | None = Field(default=None, ge=0, le=65_535)


class Bitrix24Settings(BaseModel):
    """bitrix24-php-lib's tables, and how the portals behind them are asked.

    `stand_in` is a loopback address and port that answers for every host under `.test`, for tests alone: it is
    refused beside an OAuth server whose name is a real one (adapters/checked_http.py).
    """

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    installations_table: str = "b24lib_application_installations"
    accounts_table: str = "b24lib_bitrix24_accounts"
    journal_table: str = "b24lib_journal"
    php_timezone: str = "UTC"
    client_id: str | None = None
    client_secret: SecretStr | None = None
    oauth_url: str = "https://oauth.bitrix.info"
    request_timeout: Duration = timedelta(seconds=10)
    concurrency: int = Field(default=16, ge=1, le=64)
    stand_in: str | None = None


class Settings(BaseSettings):
    """Everything that crmctl can be told outside its command line."""

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX,
        env_nested_delimiter="__",
        extra="ignore",
        hide_input_in_errors=True,
    )

    database_url: SecretStr | None = None
    installations_database_url: SecretStr | None = None
    database: DatabaseSettings = DatabaseSettings()
    kafka: KafkaSettings = KafkaSettings()
    auth: AuthSettings = AuthSettings()
    chat_status: ChatStatusSettings = ChatStatusSettings()
    bitrix24: Bitrix24Settings = Bitrix24Settings()
    actor_token: SecretStr | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "json", "text"] = "auto"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Environment first, then secret files; `load` passes the TOML file as the initial values."""
        # `…_FILE` names a secret file, and is no setting of its own.
        environment = {
            name: value
            for name, value in os.environ.items()
            if name.upper().startswith(_PREFIX) and not name.upper().endswith("_FILE") and value
        }
        return _Variables(settings_cls, environment), _Variables(settings_cls, _secrets()), init_settings


class _Variables(EnvSettingsSource):
    """Settings that are named as environment variables are, wherever their values were read.

    Raises ConfigurationError for a value that is no text, or no JSON where several settings are given at once.
    """

    def __init__(self, settings_cls: type[BaseSettings], values: Mapping[str, str]) -> None:
        super().__init__(settings_cls)
        self.env_vars = {name.lower(): value for name, value in values.items()}
        for name, value in values.items():
            field = name.lower().removeprefix(_PREFIX.lower()).split("__")[0]
            if field in settings_cls.model_fields and not _is_utf8(value):
                raise ConfigurationError(f"setting {name.upper()} is wrong: it is not UTF-8")

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        """The value as JSON; `field_name` is the last part of the variable's name."""
        try:
            return super().decode_complex_value(field_name, field, value)
        except (ValueError, RecursionError):
            names = (name for name, text in self.env_vars.items() if text == value and name.endswith(field_name))
            raise ConfigurationError(
                f"setting {next(names).upper()} is wrong: it is not a JSON object",
                hint="docs/configuration.md has the form of each setting",
            ) from None


def _is_utf8(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(path: Path) -> str:
    """A path as text that every output takes: its bytes need not be UTF-8."""
    return os.fsencode(path).decode(errors="backslashreplace")


def _secrets() -> dict[str, str]:
    """Values from `CRMCTL_…_FILE` and from the secrets directory, the former first."""
    values: dict[str, str] = {}
    directory = Path(os.environ.get("CRMCTL_SECRETS_DIR", "/run/secrets"))
    try:
        names = sorted(directory.iterdir()) if directory.is_dir() else []
        files = [file for file in names if file.name.upper().startswith(_PREFIX) and file.is_file()]
    except OSError as error:
        raise ConfigurationError(f"cannot read the secrets directory {_shown(directory)}: {error.strerror}") from None
    for file in files:
        values[file.name.upper()] = _read_secret(file)
    for name, path in os.environ.items():
        if name.startswith(_PREFIX) and name.endswith("_FILE") and path:
            values[name.removesuffix("_FILE")] = _read_secret(Path(path), name)
    return values


def _read_secret(file: Path, variable: str | None = None) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigurationError(
            f"cannot read the secret file {_shown(file)}: {reason}",
            hint=f"{variable} names it" if variable else "it lies in CRMCTL_SECRETS_DIR",
        ) from None


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"cannot read {_shown(file)}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        # The parser's own text can quote the line, and the line can hold a password.
        raise ConfigurationError(f"{_shown(file)} is not valid TOML ({type(error).__name__})") from None


def _config_values() -> dict[str, Any]:
    named = os.environ.get("CRMCTL_CONFIG")
    file = Path(named or "crmctl.toml")
    if not named and not file.is_file():
        return {}
    values = _read_toml(file)
    unknown = sorted(values.keys() - Settings.model_fields.keys())
    if unknown:
        raise ConfigurationError(
            f"{_shown(file)} has unknown settings: {', '.join(unknown)}",
            hint="docs/configuration.md lists all of them",
        )
    return values


def _build(values: dict[str, Any]) -> Settings:
    try:
        return Settings(**values)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        name = "__".join(str(part) for part in first["loc"]).upper()
        raise ConfigurationError(f"setting {_PREFIX}{name} is wrong: {first['msg']}") from None


def _find_dev_file() -> Path | None:
    here = Path.cwd()
    return next((d / _DEV_FILE for d in (here, *here.parents) if (d / _DEV_FILE).is_file()), None)


def load() -> tuple[Settings, Path | None]:
    """Read the settings once, at the start of a run.

    Returns them with the path of the embedded environment's file where that supplied the database, which it
    does only if nothing else configures one. Raises ConfigurationError; its text never holds a value.
    """
    values = _config_values()
    settings = _build(values)
    if settings.database_url is None and (dev_file := _find_dev_file()) is not None:
        return _build(_read_toml(dev_file) | values), dev_file
    return settings, None


def find_dev_directory() -> Path:
    """The embedded environment's directory, here or above. Raises ConfigurationError where none runs."""
    dev_file = _find_dev_file()
    if dev_file is None:
        raise ConfigurationError("no embedded environment runs here", hint="start one with: crmctl dev up")
    return dev_file.parent


def load_embedded() -> Settings:
    """Read the settings of the embedded environment, whatever else is configured. Raises ConfigurationError."""
    values = _read_toml(find_dev_directory() / _DEV_FILE.name)
    url = values.get("database_url")
    return _build({}).model_copy(update={"database_url": SecretStr(str(url)) if url else None})
