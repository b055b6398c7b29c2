"""`crmctl demo`: the booking's story told step by step, by the real commands on servers of its own."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, cast
from uuid import UUID, uuid4

import psycopg
from confluent_kafka import Consumer

from crmctl.adapters import migrations
from crmctl.dev import identity
from crmctl.dev.environment import DATABASE, create_database, create_topics
from crmctl.dev.kafka import temporary_broker
from crmctl.dev.messenger import ChatStatusChanged, send
from crmctl.dev.postgres import temporary_server
from crmctl.dev.seed import seed
from crmctl.domain.chat_status import RETRY_PAUSES
from crmctl.domain.errors import CrmctlError
from crmctl.domain.events import BOOKING_EXPIRED
from crmctl.domain.topics import CHAT_STATUS_DLQ_TOPIC
from crmctl.jobs.extend_booking import PERMISSION

_BOOKINGS: Final = 2_000
_CONSUME_SECONDS: Final = 30.0


def tell(write: Callable[[str], None]) -> None:
    """Tell the story to `write`; leaves nothing behind, neither a process nor a file.

    Raises CrmctlError when a step does not end as the story has it.
    """
    with _servers(write) as story:
        booking_id = story.expire()
        story.extend()
        story.race()
        story.relay(booking_id)
        story.chat()
    write("\nThe servers are stopped and their files are gone. Next: crmctl dev up\n")


@contextmanager
def _servers(write: Callable[[str], None]) -> Iterator["_Story"]:
    write("1. A PostgreSQL server and a Kafka broker of our own, with the CRM's schema and sample data\n\n")
    with (
        temporary_server() as server,
        temporary_broker(announce=lambda text: write(f"   {text}\n")) as broker,
        tempfile.TemporaryDirectory() as private,
    ):
        create_database(server)
        url = server.url(DATABASE)
        migrations.upgrade(url)
        create_topics(broker)
        with psycopg.connect(url) as connection:
            version = connection.info.server_version // 10_000
            seeded = seed(connection, _BOOKINGS)
        write(f"   PostgreSQL {version}, {broker.kind}; {seeded.bookings:,} bookings and their deals\n")
        key_file = Path(private, "key.pem")
        settings = {
            "CRMCTL_DATABASE_URL": url,
            "CRMCTL_KAFKA__BOOTSTRAP_SERVERS": broker.bootstrap_servers,
            "CRMCTL_AUTH__ISSUER": identity.ISSUER,
            "CRMCTL_AUTH__AUDIENCE": identity.AUDIENCE,
            "CRMCTL_AUTH__ALGORITHM": identity.ALGORITHM,
            "CRMCTL_AUTH__PUBLIC_KEY": identity.ensure_key(key_file),
            "CRMCTL_LOG_LEVEL": "error",
        }
        yield _Story(write, settings, key_file)


@dataclass(frozen=True, slots=True)
class _Story:
    write: Callable[[str], None]
    settings: Mapping[str, str] = field(repr=False)
    key_file: Path

    def expire(self) -> str:
        """What was due, one booking before, the run, the booking after, a second run that does nothing."""
        self._title("2. What is due: the deadline has passed and the status is still active")
        self._show("bookings", "list", "--due", "--limit", "5")
        booking_id: str = self._json("bookings", "list", "--due", "--limit", "1")["bookings"][0]["id"]

        self._title("3. One of them, before")
        self._show("bookings", "show", booking_id)

        self._title("4. A dry run says exactly what the run will do, and changes nothing")
        self._show("bookings", "expire", "--drain", "--dry-run")

        self._title("5. The run: status, timeline and event of each booking change together")
        self._show("bookings", "expire", "--drain")
        if left := self._json("bookings", "list", "--due")["bookings"]:
            raise CrmctlError(f"{len(left)} bookings are still due after the run, {left[0]['id']} first")

        self._title("6. The same booking, after: terminal, with its timeline entry and its event")
        self._show("bookings", "show", booking_id)

        self._title("7. A second run finds nothing to do: expired bookings have left the queue")
        self._show("bookings", "expire", "--drain")
        return booking_id

    def extend(self) -> None:
        """A manager extends a booking that is still active."""
        self._title("8. A manager extends a booking in time: the deadline moves by the program's duration")
        booking = self._json("bookings", "list", "--status", "Booked", "--limit", "1")["bookings"][0]
        self._show("bookings", "extend", booking["id"], token=self._token(booking["tenant_id"]))

    def race(self) -> None:
        """An extension and the expiry meet on one booking at its deadline."""
        self._title("9. A race: an extension and the expiry meet on one booking at its deadline")
        booking = self._json("bookings", "list", "--status", "Booked", "--limit", "2")["bookings"][-1]
        booking_id = booking["id"]
        with psycopg.connect(self.settings["CRMCTL_DATABASE_URL"]) as connection:
            connection.execute(
                "update crm.bookings set booking_expires_at = now() - interval '1 second' where id = %s", (booking_id,)
            )
        expiry = self._start("bookings", "expire", "--id", booking_id)
        extension = self._start("bookings", "extend", booking_id, token=self._token(booking["tenant_id"]))
        for process in (expiry, extension):
            process.communicate()
        after = self._json("bookings", "show", booking_id)
        won = {0: "the extension won", 12: "the expiry won, the extension was told CRM_BOOKING_INVALID_STATE"}
        if expiry.returncode != 0 or extension.returncode not in won:
            raise CrmctlError(f"the race ended with exit codes {expiry.returncode} and {extension.returncode}")
        status, events = after["booking"]["status"], len(after["events"])
        self.write(f"   {won[extension.returncode]}: status {status}, {events} event(s)\n")
        if (status, events) != (("Booked", 0) if extension.returncode == 0 else ("BookingExpired", 1)):
            raise CrmctlError(f"the race left booking {booking_id} in {status} with {events} events")

    def relay(self, booking_id: str) -> None:
        """The outbox goes to Kafka; the first booking's event as a consumer sees it."""
        self._title("10. The relay publishes what was committed, in order per booking")
        self._show("outbox", "relay", "--drain")

        self._title(f"11. The event of booking {booking_id}, as a Kafka consumer sees it")
        key, headers, value = self._consume(booking_id)
        self.write(f"   key      {key}\n")
        for name, text in headers:
            self.write(f"   header   {name}: {text}\n")
        self.write("".join(f"   {line}\n" for line in json.dumps(json.loads(value), indent=2).splitlines()))

    def chat(self) -> None:
        """A deal's chat becomes Ready, an early event waits for its deal, a bad one becomes a dead letter."""
        self._title("12. Messenger reports on deal chats: one gets ready, one is early, one status is unknown")
        deal_id, tenant_id = self._pending_deal()
        early = uuid4()
        events = [
            ChatStatusChanged(deal_id, tenant_id, "Provisioning"),
            ChatStatusChanged(deal_id, tenant_id, "Ready"),
            ChatStatusChanged(early, tenant_id, "Ready"),
            ChatStatusChanged(deal_id, tenant_id, "Teleported"),
        ]
        send(self.settings["CRMCTL_KAFKA__BOOTSTRAP_SERVERS"], events)
        self._show("chat-status", "consume", "--until-caught-up")
        self.write(f"   deal {deal_id}: chat_status {self._chat_status(deal_id)}\n")

        self._title("13. The early event's deal appears; the retry after 5 s applies it")
        with psycopg.connect(self.settings["CRMCTL_DATABASE_URL"]) as connection:
            connection.execute(
                "insert into crm.deals (id, tenant_id, status, created_at, updated_at)"
                " values (%s, %s, 'InProgress', now(), now())",
                (early, tenant_id),
            )
        time.sleep(RETRY_PAUSES[0].total_seconds())
        self._show("chat-status", "consume", "--until-caught-up")
        self.write(f"   deal {early}: chat_status {self._chat_status(early)}\n")
        if (found := [self._chat_status(deal_id), self._chat_status(early)]) != ["Ready", "Ready"]:
            raise CrmctlError(f"the chats are {found}, both should be Ready")

        self._title("14. The unknown status is a dead letter: the original record, with the reason in its headers")
        _, headers, _ = self._consume(str(deal_id), CHAT_STATUS_DLQ_TOPIC.name)
        for name, text in headers:
            self.write(f"   header   {name}: {text}\n")

    def _pending_deal(self) -> tuple[UUID, UUID]:
        with psycopg.connect(self.settings["CRMCTL_DATABASE_URL"]) as connection:
            row = connection.execute(
                "select id, tenant_id from crm.deals where chat_status = 'Pending' order by id limit 1"
            ).fetchone()
        if row is None:
            raise CrmctlError("the sample data has no deal whose chat is pending")
        return row[0], row[1]

    def _chat_status(self, deal_id: UUID) -> str:
        with psycopg.connect(self.settings["CRMCTL_DATABASE_URL"]) as connection:
            row = connection.execute("select chat_status from crm.deals where id = %s", (deal_id,)).fetchone()
        return "missing" if row is None else str(row[0])

    def _consume(self, wanted: str, topic: str = BOOKING_EXPIRED.topic) -> tuple[str, list[tuple[str, str]], str]:
        consumer = Consumer(
            {
                "bootstrap.servers": self.settings["CRMCTL_KAFKA__BOOTSTRAP_SERVERS"],
                "group.id": "demo",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
            }
        )
        try:
            consumer.subscribe([topic])
            while (message := consumer.poll(_CONSUME_SECONDS)) is not None:
                key, value = message.key(), message.value()
                if message.error() is None and key and value and key.decode() == wanted:
                    headers = cast(list[tuple[str, bytes]], message.headers() or [])
                    return key.decode(), [(name, text.decode()) for name, text in headers], value.decode()
        finally:
            consumer.close()
        raise CrmctlError(f"the record of {wanted} did not arrive in {topic}")

    def _token(self, tenant_id: str) -> str:
        return identity.issue(
            self.key_file,
            tenant_id=UUID(tenant_id),
            subject="demo-manager",
            permissions=[PERMISSION],
            ttl=timedelta(minutes=10),
        )

    def _title(self, text: str) -> None:
        self.write(f"\n{text}\n\n")

    def _show(self, *args: str, token: str | None = None) -> None:
        self.write(f"   $ crmctl {' '.join(args)}\n")
        self.write("".join(f"   {line}".rstrip() + "\n" for line in self._run(*args, token=token).splitlines()))

    def _json(self, *args: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self._run(*args, "-o", "json"))
        return document

    def _run(self, *args: str, token: str | None = None) -> str:
        process = self._start(*args, token=token)
        stdout, stderr = process.communicate()
        if process.returncode != 0:
            raise CrmctlError(f"`crmctl {' '.join(args)}` exited {process.returncode}: {stderr.strip()}")
        return stdout

    def _start(self, *args: str, token: str | None = None) -> subprocess.Popen[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("CRMCTL_")}
        environment |= self.settings
        if token is not None:
            environment["CRMCTL_ACTOR_TOKEN"] = token
        return subprocess.Popen(
            [sys.executable, "-m", "crmctl", *args],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )
