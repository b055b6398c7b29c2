"""bitrix24-php-lib's tables as this database has them: their names, their columns, PHP's time zone.

The tables belong to the library; crmctl never creates or alters them. Which columns the embedded values have
depends on the application's Doctrine naming strategy, so the catalogue is asked.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from psycopg import errors
from psycopg.rows import DictRow

from crmctl.adapters.postgres import Transaction
from crmctl.domain.errors import ConfigurationError
from crmctl.settings import Bitrix24Settings
from crmctl.sql import load

STATEMENTS: Final = load("bitrix24_tables")

# The columns that the statements name, by table.
_COLUMNS: Final[Mapping[str, tuple[str, ...]]] = {
    "installations": (
        "id",
        "status",
        "created_at_utc",
        "update_at_utc",
        "bitrix_24_account_id",
        "application_token",
        "comment",
        "external_id",
        "portal_license_family",
    ),
    "accounts": (
        "id",
        "b24_user_id",
        "member_id",
        "is_master_account",
        "domain_url",
        "status",
        "application_token",
        "created_at_utc",
        "updated_at_utc",
        "comment",
    ),
    "journal": (
        "id",
        "member_id",
        "application_installation_id",
        "created_at_utc",
        "level",
        "message",
        "label",
        "context_payload",
        "context_bitrix24_user_id",
        "context_ip_address",
    ),
}
# The embedded token's prefix: the default strategy's, folded by PostgreSQL, and the underscore strategy's.
_TOKEN_PREFIXES: Final = ("authtoken_", "auth_token_")
_TOKEN_COLUMNS: Final = ("access_token", "refresh_token", "expires", "expires_in")


@dataclass(frozen=True, slots=True)
class Tables:
    """Quoted names of the tables and of the token's columns, ready for a statement."""

    names: Mapping[str, str]

    def fill(self, statements: Mapping[str, str], **fragments: str) -> dict[str, str]:
        """Put the names, and fragments of our own, into the templates of an SQL file."""
        return {name: text.format(**self.names, **fragments) for name, text in statements.items()}


def exist(tx: Transaction, settings: Bitrix24Settings) -> bool:
    """Whether any of the tables is there: where none is, nobody uses Bitrix24. Raises ConfigurationError."""
    return any(_look_up(tx, key, table)["name"] is not None for key, table in _tables(settings).items())


def resolve(tx: Transaction, settings: Bitrix24Settings) -> Tables:
    """Look the tables up, through the search path unless a setting names the schema.

    Raises ConfigurationError for a table or a column that is not there, and for an unknown time zone.
    """
    names: dict[str, str] = {}
    for key, table in _tables(settings).items():
        found = _look_up(tx, key, table)
        if found["name"] is None:
            raise ConfigurationError(
                f"there is no table {table} for the role's search path",
                hint=f"set {_variable(key)}; older releases of bitrix24-php-lib use other names",
            )
        missing = [column for column in _COLUMNS[key] if column not in found["columns"]]
        if missing:
            raise ConfigurationError(
                f"{table} lacks the column {missing[0]}: it is not a table of bitrix24-php-lib",
                hint=f"set {_variable(key)}",
            )
        names[key] = found["name"]
        if key == "accounts":
            names |= _token_columns(table, found["columns"])
    try:
        tx.execute(STATEMENTS["time_zone"], {"zone": settings.php_timezone})
    except errors.InvalidParameterValue:
        raise ConfigurationError(
            f"PostgreSQL knows no time zone {settings.php_timezone!r}", hint="set CRMCTL_BITRIX24__PHP_TIMEZONE"
        ) from None
    return Tables(names)


def _tables(settings: Bitrix24Settings) -> dict[str, str]:
    return {
        "installations": settings.installations_table,
        "accounts": settings.accounts_table,
        "journal": settings.journal_table,
    }


def _look_up(tx: Transaction, key: str, table: str) -> DictRow:
    try:
        return tx.one(STATEMENTS["table"], {"table": table})
    except (errors.SyntaxError, errors.InvalidName, errors.FeatureNotSupported):
        raise ConfigurationError(f"{table!r} is no table name", hint=f"set {_variable(key)}") from None


def _token_columns(table: str, columns: list[str]) -> dict[str, str]:
    for prefix in _TOKEN_PREFIXES:
        if all(prefix + column in columns for column in _TOKEN_COLUMNS):
            return {column: _quoted(prefix + column) for column in _TOKEN_COLUMNS}
    raise ConfigurationError(
        f"{table} has the token's columns under no known naming strategy",
        hint=f"expected {' or '.join(prefix + _TOKEN_COLUMNS[0] for prefix in _TOKEN_PREFIXES)}",
    )


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _variable(key: str) -> str:
    return f"CRMCTL_BITRIX24__{key.upper()}_TABLE"
