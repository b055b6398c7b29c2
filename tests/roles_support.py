"""What the tests of roles share: the roles of one database, and users that log in with one of them."""

from dataclasses import dataclass

import psycopg
from psycopg import sql

from crmctl.domain.grants import Kind
from tests.prefork import run_crmctl
from tests.support import Database

_PASSWORD = "correct-horse"


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles of `crmctl db roles` under a prefix of this test's own: roles belong to the whole server."""

    database: Database
    prefix: str

    @classmethod
    def make(cls, database: Database) -> "Roles":
        """Create them with the real command."""
        name = psycopg.conninfo.conninfo_to_dict(database.url)["dbname"]
        roles = cls(database, f"{name}_")
        result = run_crmctl("db", "roles", "--prefix", roles.prefix, database=database)
        assert result.exit_code == 0, result.stderr
        return roles

    def name(self, kind: Kind) -> str:
        """The role's name."""
        return f"{self.prefix}{kind}"

    def user(self, kind: Kind) -> str:
        """The name of the user that logs in with a role."""
        return f"{self.name(kind)}_user"

    def login(self, kind: Kind) -> str:
        """The DSN of a user that has this role and nothing else; the user is created when it is first asked for."""
        with self.database.connect() as connection:
            if connection.execute("select from pg_roles where rolname = %s", (self.user(kind),)).fetchone() is None:
                connection.execute(
                    sql.SQL("create role {} login password {} in role {}").format(
                        sql.Identifier(self.user(kind)), sql.Literal(_PASSWORD), sql.Identifier(self.name(kind))
                    )
                )
        parts = psycopg.conninfo.conninfo_to_dict(self.database.url)
        return psycopg.conninfo.make_conninfo(
            **{**parts, "user": self.user(kind), "password": _PASSWORD}  # type: ignore[arg-type]
        )
