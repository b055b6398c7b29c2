"""`crmctl demo`: the main job told step by step, by the real commands on a PostgreSQL of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg import sql

from crmctl.adapters import migrations
from crmctl.dev.environment import DATABASE
from crmctl.dev.postgres import temporary_server
from crmctl.dev.seed import seed
from crmctl.domain.errors import CrmctlError

_BOOKINGS: Final = 2_000


def tell(write: Callable[[str], None]) -> None:
    """Tell the story to `write`; leaves nothing behind, neither a process nor a file.

    Raises CrmctlError when a step does not end as the story has it.
    """
    write("1. A PostgreSQL server of our own, with the CRM's schema and sample data\n\n")
    with temporary_server() as server:
        with psycopg.connect(server.url(), autocommit=True) as connection:
            version = connection.info.server_version // 10_000
            connection.execute(sql.SQL("create database {}").format(sql.Identifier(DATABASE)))
        migrations.upgrade(server.url(DATABASE))
        with psycopg.connect(server.url(DATABASE)) as connection:
            seeded = seed(connection, _BOOKINGS)
        write(f"   PostgreSQL {version}; {seeded.bookings:,} bookings and their deals\n")
        _Story(write, server.url(DATABASE)).expire()
    write("\nThe server is stopped and its files are gone. Next: crmctl dev up\n")


@dataclass(frozen=True, slots=True)
class _Story:
    write: Callable[[str], None]
    database_url: str

    def expire(self) -> None:
        """What was due, one booking before, the run, the booking after, a second run that does nothing."""
        self._title("2. What is due: the deadline has passed and the status is still active")
        self._show("bookings", "list", "--due", "--limit", "5")
        due = self._json("bookings", "list", "--due", "--limit", "100000")["bookings"]
        booking_id = due[0]["id"]

        self._title("3. One of them, before")
        self._show("bookings", "show", booking_id)

        self._title("4. A dry run says exactly what the run will do, and changes nothing")
        self._show("bookings", "expire", "--drain", "--dry-run")

        self._title("5. The run: status, timeline and event of each booking change together")
        self._show("bookings", "expire", "--drain")
        left = self._json("bookings", "list", "--due")["bookings"]
        if left:
            raise CrmctlError(f"{len(left)} bookings are still due after the run, {left[0]['id']} first")

        self._title("6. The same booking, after: terminal, with its timeline entry and its event")
        self._show("bookings", "show", booking_id)

        self._title("7. A second run finds nothing to do: expired bookings have left the queue")
        self._show("bookings", "expire", "--drain")

    def _title(self, text: str) -> None:
        self.write(f"\n{text}\n\n")

    def _show(self, *args: str) -> None:
        self.write(f"   $ crmctl {' '.join(args)}\n")
        self.write("".join(f"   {line}\n" for line in self._run(*args).splitlines()))

    def _json(self, *args: str) -> dict[str, list[dict[str, str]]]:
        document: dict[str, list[dict[str, str]]] = json.loads(self._run(*args, "-o", "json"))
        return document

    def _run(self, *args: str) -> str:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("CRMCTL_")}
        environment |= {"CRMCTL_DATABASE_URL": self.database_url, "CRMCTL_LOG_LEVEL": "error"}
        done = subprocess.run(
            [sys.executable, "-m", "crmctl", *args],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        if done.returncode != 0:
            raise CrmctlError(f"`crmctl {' '.join(args)}` exited {done.returncode}: {done.stderr.strip()}")
        return done.stdout
