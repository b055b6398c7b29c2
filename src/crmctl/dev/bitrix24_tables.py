"""bitrix24-php-lib's tables as Doctrine creates them, and its pairs, for `dev up`, `dev seed` and tests.

They belong to that library: nothing in production ever creates them. The names of the columns that hold embedded
values depend on the application's naming strategy; PostgreSQL folds the default strategy's to lower case.
"""

from dataclasses import dataclass
from typing import Any, Final, Literal

import psycopg
from psycopg import sql

Naming = Literal["default", "underscore"]


@dataclass(frozen=True, slots=True)
class Names:
    """What the tables are called; older releases of the library had other names."""

    installations: str = "b24lib_application_installations"
    accounts: str = "b24lib_bitrix24_accounts"
    journal: str = "b24lib_journal"


CURRENT: Final = Names()
OLDER: Final = Names(installations="application_installation", accounts="bitrix24account", journal="journal")

_PREFIXES: Final[dict[Naming, dict[str, str]]] = {
    "default": {"token": "authtoken", "scope": "applicationscope", "application_status": "applicationstatus"},
    "underscore": {"token": "auth_token", "scope": "application_scope", "application_status": "application_status"},
}

_INSTALLATIONS: Final = """
    create table if not exists {installations} (
        id                                 uuid         primary key,
        status                             varchar(255) not null,
        created_at_utc                     timestamp(3) without time zone not null,
        update_at_utc                      timestamp(3) without time zone not null,
        bitrix_24_account_id               uuid         not null unique,
        contact_person_id                  uuid,
        bitrix_24_partner_contact_person_id uuid,
        bitrix_24_partner_id               uuid,
        external_id                        varchar(255),
        portal_license_family              varchar(255) not null,
        portal_users_count                 integer,
        application_token                  varchar(255),
        comment                            text,
        {application_status_status_code}   json
    )
"""
_ACCOUNTS: Final = """
    create table if not exists {accounts} (
        id                    uuid         primary key,
        b24_user_id           integer      not null,
        is_b24_user_admin     boolean      not null,
        member_id             varchar(255) not null,
        is_master_account     boolean,
        domain_url            varchar(255) not null,
        status                varchar(255) not null,
        application_token     varchar(255),
        created_at_utc        timestamp(3) without time zone not null,
        updated_at_utc        timestamp(3) without time zone not null,
        application_version   integer      not null,
        comment               text,
        {token_access_token}  varchar(255) not null,
        {token_refresh_token} varchar(255) not null,
        {token_expires}       bigint       not null,
        {token_expires_in}    integer,
        {scope_current_scope} json
    )
"""
_JOURNAL: Final = """
    create table if not exists {journal} (
        id                          uuid         primary key,
        member_id                   varchar(255) not null,
        application_installation_id uuid         not null,
        created_at_utc              timestamp(6) without time zone not null,
        level                       varchar(255) not null,
        message                     text         not null,
        label                       varchar(255) not null,
        context_payload             json,
        context_bitrix24_user_id    integer,
        context_ip_address          bytea        not null
    )
"""
_JOURNAL_INDEXES: Final = """
    create index if not exists b24lib_journal_idx_composite
        on {journal} (member_id, application_installation_id, level, created_at_utc);
    create index if not exists b24lib_journal_idx_created_at on {journal} (created_at_utc);
    create index if not exists b24lib_journal_idx_member_id on {journal} (member_id)
"""


def create(connection: psycopg.Connection[Any], naming: Naming = "default", names: Names = CURRENT) -> None:
    """Create the three tables where they are missing, in the first schema of the search path."""
    prefixes = _PREFIXES[naming]
    parts = {
        "installations": sql.Identifier(names.installations),
        "accounts": sql.Identifier(names.accounts),
        "journal": sql.Identifier(names.journal),
        "application_status_status_code": sql.Identifier(f"{prefixes['application_status']}_status_code"),
        "scope_current_scope": sql.Identifier(f"{prefixes['scope']}_current_scope"),
        **{
            f"token_{column}": sql.Identifier(f"{prefixes['token']}_{column}")
            for column in ("access_token", "refresh_token", "expires", "expires_in")
        },
    }
    for statement in (_INSTALLATIONS, _ACCOUNTS, _JOURNAL, _JOURNAL_INDEXES):
        connection.execute(sql.SQL(statement).format(**parts))
