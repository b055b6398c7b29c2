"""`crmctl bookings …`: expire, extend, list, show."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any
from uuid import UUID

import typer

from crmctl.cli import output
from crmctl.cli.options import AsOf, DryRun, Output, Strict, Tenant, TimeBudget

app = typer.Typer(help="Bookings: expire, extend, look at them.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def expire(
    batch_size: Annotated[int, typer.Option(min=1, max=100_000, help="Bookings of each phase per transaction.")] = 1000,
    drain: Annotated[bool, typer.Option("--drain", help="Go on, batch by batch, until nothing new is due.")] = False,
    time_budget: TimeBudget = timedelta(seconds=50),
    max_expire: Annotated[int | None, typer.Option(min=1, help="Expire at most this many in the whole run.")] = None,
    tenant: Tenant = None,
    booking_id: Annotated[
        list[UUID] | None, typer.Option("--id", metavar="ID", help="Only this booking; may be repeated.")
    ] = None,
    as_of: AsOf = None,
    dry_run: DryRun = False,
    strict: Strict = False,
    form: Output = output.Format.TABLE,
) -> None:
    """Expire reserves and bookings whose deadline has passed.

    Each batch is one transaction: status, timeline and outbox message of a booking change together or not at
    all. Rows that somebody else holds are skipped; rows that cannot be expired are reported and left as they are.

    \b
    Examples:
      crmctl bookings expire --drain
      crmctl bookings expire --dry-run -o json
      crmctl bookings expire --id 6f1c9a52-8a2e-4c1b-9a53-0d3f3f6b9e11
    """
    from crmctl.cli.command import Command
    from crmctl.cli.run import Plan, View, run_job
    from crmctl.jobs.expire_bookings import JOB, Options

    options = Options(
        batch_size=batch_size,
        max_expire=max_expire,
        tenant_id=tenant,
        booking_ids=tuple(dict.fromkeys(booking_id or ())),
        as_of=as_of,
        dry_run=dry_run,
    )
    plan = Plan(as_of=as_of, drain=drain, time_budget=time_budget, dry_run=dry_run)
    with Command(form) as command:
        run_job(command, JOB, options, View(form, _render_expire, strict=strict), plan)


@app.command()
def extend(
    booking_id: Annotated[UUID, typer.Argument(metavar="BOOKING_ID")],
    tenant: Annotated[
        UUID | None, typer.Option("--tenant", metavar="ID", help="Refuse unless this is the actor's tenant.")
    ] = None,
    request_id: Annotated[
        UUID | None,
        typer.Option(metavar="UUID", help="The same id again returns the first answer. Default: a new one."),
    ] = None,
    dry_run: DryRun = False,
    form: Output = output.Format.TABLE,
) -> None:
    """Extend an active booking by its program's duration, for the actor whose token is in CRMCTL_ACTOR_TOKEN.

    The new deadline counts from the old one. Without --request-id a new id is printed on stderr before anything
    is written: name it when you try again after a lost connection, and nothing is extended twice.

    \b
    Examples:
      crmctl bookings extend 6f1c9a52-8a2e-4c1b-9a53-0d3f3f6b9e11
      CRMCTL_ACTOR_TOKEN_FILE=token crmctl bookings extend 6f1c9a52-8a2e-4c1b-9a53-0d3f3f6b9e11 -o json
    """
    from uuid import uuid4

    from crmctl.cli.command import Command
    from crmctl.cli.run import Plan, View, run_job

    with Command(form) as command:
        from crmctl.adapters import identity
        from crmctl.jobs import extend_booking

        command.subject = {"booking_id": str(booking_id)}
        token = command.settings.actor_token
        actor = identity.authenticate(token.get_secret_value() if token else None, command.settings.auth)
        extend_booking.authorise(actor, tenant)
        request = request_id or uuid4()
        command.subject["request_id"] = str(request)
        if request_id is None:
            command.notice("new request id; name it with --request-id to try again", request_id=str(request))
        options = extend_booking.Options(booking_id=booking_id, request_id=request, actor=actor)
        run_job(command, extend_booking.job(actor), options, View(form, _render_extend), Plan(dry_run=dry_run))


@app.command("list")
def list_bookings(
    due: Annotated[bool, typer.Option("--due", help="Only those whose deadline has passed.")] = False,
    status: Annotated[
        list[str] | None, typer.Option(metavar="STATUS", help="Only this status; may be repeated.")
    ] = None,
    tenant: Tenant = None,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="Rows at the most.")] = 50,
    form: Output = output.Format.TABLE,
) -> None:
    """List bookings: the active ones by deadline, or those of a status, the latest changed first.

    \b
    Examples:
      crmctl bookings list --due
      crmctl bookings list --status BookingExpired --limit 10 -o json
    """
    from crmctl.cli.run import View, run_query
    from crmctl.jobs import list_bookings as job

    if due and status:
        raise typer.BadParameter("--due lists active bookings only; it does not go with --status")
    options = job.Options(due=due, statuses=tuple(status or ()), tenant_id=tenant, limit=limit)
    run_query("bookings list", lambda tx: job.query(tx, options), View(form, _render_list))


@app.command()
def show(
    booking_id: Annotated[UUID, typer.Argument(metavar="BOOKING_ID")],
    form: Output = output.Format.TABLE,
) -> None:
    """Show a booking with its timeline and its events.

    \b
    Example:
      crmctl bookings show 6f1c9a52-8a2e-4c1b-9a53-0d3f3f6b9e11 -o json
    """
    from crmctl.cli.run import View, run_query
    from crmctl.jobs import show_booking as job

    run_query("bookings show", lambda tx: job.query(tx, booking_id), View(form, render_show))


def _render_expire(document: Mapping[str, Any]) -> str:
    lines = {
        "Would expire" if document["dry_run"] else "Expired": document["reserve_expired_count"]
        + document["booking_expired_count"],
        "  reserves": document["reserve_expired_count"],
        "  bookings": document["booking_expired_count"],
        "Skipped, locked": document["skipped_locked_count"],
        "Poison": document["poison_count"],
        "Undetermined": document["undetermined_count"],
        "More are due": document["has_more"],
        "As of": document["as_of"].isoformat(),
        "Batches": document["batches"],
        "Duration, ms": document["duration_ms"],
    }
    text = output.fields(lines)
    for title, rows in (("Poison", document["poison"]), ("Not expired", document["not_expired"])):
        if rows:
            text += f"\n{title}:\n" + output.table(
                ("booking_id", "reason"), [(row["booking_id"], row["reason"]) for row in rows]
            )
    return text


def _render_extend(document: Mapping[str, Any]) -> str:
    verb = "Would extend" if document["dry_run"] else "Extended before" if document["repeated"] else "Extended"
    text = output.fields(
        {
            verb: document["booking_id"],
            "Old deadline": document["old_booking_expires_at"],
            "New deadline": document["new_booking_expires_at"],
            "Extensions": document["extensions_count"],
            "Request id": document["request_id"],
        }
    )
    if document["new_deadline_is_past"]:
        text += "Warning: the new deadline is past as well; the next expiry will expire the booking.\n"
    return text


_LIST_COLUMNS = ("id", "tenant_id", "status", "deadline", "overdue", "version")


def _render_list(document: Mapping[str, Any]) -> str:
    bookings = document["bookings"]
    if not bookings:
        return "No bookings.\n"
    return output.table(_LIST_COLUMNS, [[row[column] for column in _LIST_COLUMNS] for row in bookings])


_BOOKING_FIELDS = (
    "id",
    "tenant_id",
    "deal_id",
    "property_object_id",
    "status",
    "created_at",
    "reserve_duration_minutes",
    "reserve_expires_at",
    "booked_at",
    "booking_duration_hours",
    "booking_expires_at",
    "expired_at",
    "extensions_count",
    "version",
    "updated_at",
)
_SHOW_COLUMNS = {
    "timeline": ("occurred_at", "type", "payload"),
    "events": ("created_at", "published_at", "message_id", "topic", "payload"),
}


def render_show(document: Mapping[str, Any]) -> str:
    """The booking's fields, then its timeline and events as two tables."""
    booking = document["booking"]
    known = {name: booking[name] for name in _BOOKING_FIELDS if name in booking}
    text = output.fields({**known, **booking})
    for title, columns in _SHOW_COLUMNS.items():
        rows = document[title]
        text += f"\n{title.capitalize()}:\n"
        text += output.table(columns, [[row[column] for column in columns] for row in rows]) if rows else "  none\n"
    return text
