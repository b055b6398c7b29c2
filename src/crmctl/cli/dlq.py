"""`crmctl dlq …`: list, show, replay, discard."""

import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, NoReturn
from uuid import UUID

import typer

from crmctl.cli import output
from crmctl.cli.options import DryRun, Output, Strict, duration, instant

if TYPE_CHECKING:
    from crmctl.adapters.topic_reader import TopicReader
    from crmctl.cli.command import Command
    from crmctl.domain.dead_letters import Filters
    from crmctl.jobs.dead_letter_walk import Progress

app = typer.Typer(help="Dead letters of the chat-status consumer.", no_args_is_help=True, rich_markup_mode=None)

Code = Annotated[list[str] | None, typer.Option("--code", metavar="CODE", help="Only this error code; repeatable.")]
DealId = Annotated[list[UUID] | None, typer.Option("--deal", metavar="ID", help="Only this deal; repeatable.")]
TenantId = Annotated[list[UUID] | None, typer.Option("--tenant", metavar="ID", help="Only this tenant; repeatable.")]
Key = Annotated[list[str] | None, typer.Option("--key", metavar="TEXT", help="Only this record key; repeatable.")]
Since = Annotated[
    datetime | None,
    typer.Option("--since", metavar="TIMESTAMP", parser=instant, help="Only what failed at this time or later."),
]
Until = Annotated[
    datetime | None,
    typer.Option("--until", metavar="TIMESTAMP", parser=instant, help="Only what failed before this time."),
]
At = Annotated[
    list[str] | None,
    typer.Option("--at", metavar="PLACE", help="Only there: 2, 2:17, 2:17-40 or 2:17-; repeatable."),
]


@app.command("list")
def list_letters(
    code: Code = None,
    deal: DealId = None,
    tenant: TenantId = None,
    key: Key = None,
    since: Since = None,
    until: Until = None,
    at: At = None,
    everything: Annotated[bool, typer.Option("--all", help="Those that are closed as well.")] = False,
    summary: Annotated[bool, typer.Option("--summary", help="Count by error code and reason.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Letters at the most. Default: all.")] = None,
    form: Output = output.Format.TABLE,
) -> None:
    """List dead letters that are open, in the order of the topic's partitions.

    \b
    Examples:
      crmctl dlq list --summary
      crmctl dlq list --code CRM_DEAL_NOT_FOUND --limit 20
      crmctl dlq list --all -o json
    """
    from crmctl.cli.command import Command

    filters = _filters(code, deal, tenant, key, since, until, at)
    with Command(form) as command, _reader(command) as reader:
        from crmctl.jobs import list_dead_letters as job

        options = job.Options(filters, all=everything, limit=limit)
        database = command.database("crmctl dlq list")
        if summary:
            document = job.summary(database.begin(read_only=True), reader, options)
            database.rollback()
            command.report(document, _render_summary)
            return
        rows = output.Rows(_LIST_COLUMNS)
        rest = job.query(database.begin(read_only=True), reader, options, rows.add)
        database.rollback()
        command.report_rows("letters", rows, rest)
        if rest["lost_count"]:
            command.notice(
                "open letters are gone from the topic", lost_count=rest["lost_count"], topic=reader.topic.name
            )


@app.command()
def show(
    letter: Annotated[str, typer.Argument(metavar="PARTITION:OFFSET", help="Where it stands, as list prints it.")],
    form: Output = output.Format.TABLE,
) -> None:
    """Show one dead letter whole: headers, envelope, its deal now, and what a replay would do.

    \b
    Example:
      crmctl dlq show 2:17 -o json
    """
    from crmctl.cli.command import Command

    [place] = _ranges([letter])
    if place.first != place.last:
        raise typer.BadParameter("name one letter, like 2:17")
    with Command(form) as command, _reader(command) as reader:
        from crmctl.jobs import show_dead_letter as job

        database = command.database("crmctl dlq show")
        document = job.query(database.begin(read_only=True), reader, place.partition, place.first)
        database.rollback()
        command.report(document, _render_show)


@app.command()
def replay(
    code: Code = None,
    deal: DealId = None,
    tenant: TenantId = None,
    key: Key = None,
    since: Since = None,
    until: Until = None,
    at: At = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Try so many letters at the most.")] = None,
    rate: Annotated[int | None, typer.Option(min=1, help="Try so many letters a second at the most.")] = None,
    max_attempts: Annotated[
        int | None, typer.Option(min=1, help="Refuse letters whose replay has failed so often.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, max=10_000, help="Letters per transaction.")] = 1000,
    time_budget: Annotated[
        timedelta | None,
        typer.Option(metavar="DURATION", parser=duration, help="Start no more work after this long."),
    ] = None,
    dry_run: DryRun = False,
    strict: Strict = False,
    form: Output = output.Format.TABLE,
) -> None:
    """Apply dead letters to the deals, by the consumer's own rule; what became of each is kept.

    Safe to repeat, to interrupt and to run twice at once: a letter that is resolved is passed over, and one whose
    cause is still there stays as it is. Without filters every open letter is tried.

    \b
    Examples:
      crmctl dlq replay --dry-run
      crmctl dlq replay --code CRM_DEAL_NOT_FOUND --rate 100
      crmctl dlq replay --at 2:17 --strict -o json
    """
    from crmctl.cli.command import Command
    from crmctl.cli.run import Plan, View, run_job
    from crmctl.cli.whoami import operator

    filters = _filters(code, deal, tenant, key, since, until, at)
    with Command(form) as command, _reader(command) as reader:
        from crmctl.jobs import replay_dead_letters as job
        from crmctl.jobs.dead_letter_walk import Options

        options = Options(
            command.settings.chat_status.dlq_group,
            filters,
            batch_size=batch_size,
            limit=limit,
            rate=None if dry_run else rate,
            max_attempts=max_attempts,
        )
        # What is loaded by now stays; the collector need not walk through it again with every few batches.
        gc.freeze()
        with _bar(reader) as advance:
            run_job(
                command,
                job.job(reader, operator(), advance),
                options,
                View(form, _render_replay, strict=strict),
                Plan(drain=True, time_budget=time_budget, dry_run=dry_run),
            )


@app.command()
def discard(
    letters: Annotated[
        list[str] | None, typer.Argument(metavar="[PARTITION:OFFSET]...", help="Letters, as list prints them.")
    ] = None,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; it is kept with each letter.")] = "",
    code: Code = None,
    deal: DealId = None,
    tenant: TenantId = None,
    key: Key = None,
    since: Since = None,
    until: Until = None,
    at: At = None,
    lost: Annotated[
        bool, typer.Option("--lost", help="Instead: all that were open when their topic lost them.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    dry_run: DryRun = False,
    form: Output = output.Format.TABLE,
) -> None:
    """Close dead letters that will never be applied. Asks first; the records stay in their topic.

    With --lost it acknowledges letters that were open when retention or a deletion took their records.

    \b
    Examples:
      crmctl dlq discard 2:17 2:18 --reason "test data" --yes
      crmctl dlq discard --code CRM_CHAT_STATUS_MALFORMED --reason "sent by hand" --dry-run
      crmctl dlq discard --lost --reason "retention was too short, INC-43"
    """
    from crmctl.cli.command import Command
    from crmctl.cli.run import Plan, View, run_job
    from crmctl.cli.whoami import operator

    if not reason.strip():
        raise typer.BadParameter("say why: --reason TEXT")
    filters = _filters(code, deal, tenant, key, since, until, [*(at or ()), *(letters or ())])
    if lost:
        if not filters.empty:
            raise typer.BadParameter("--lost means all that are lost, and goes with no letters and no filters")
        _acknowledge_lost(reason.strip(), yes=yes, dry_run=dry_run, form=form)
    if filters.empty:
        raise typer.BadParameter("name letters, or select them by a filter; every open letter is: --at 0 --at 1 …")
    with Command(form) as command, _reader(command) as reader:
        from crmctl.jobs import discard_dead_letters as job
        from crmctl.jobs.dead_letter_walk import Options

        if not yes and not dry_run:
            command.confirm(f"Discard {_count(command, reader, filters)} letters of {reader.topic.name}?")
        with _bar(reader) as advance:
            run_job(
                command,
                job.job(reader, operator(), reason.strip(), advance),
                Options(command.settings.chat_status.dlq_group, filters),
                View(form, _render_discard),
                Plan(drain=True, dry_run=dry_run),
            )


def _acknowledge_lost(reason: str, *, yes: bool, dry_run: bool, form: output.Format) -> NoReturn:
    from crmctl.cli.command import Command
    from crmctl.cli.run import Plan, View, run_job
    from crmctl.cli.whoami import operator

    with Command(form) as command, _reader(command) as reader:
        from crmctl.jobs import acknowledge_lost_letters as job
        from crmctl.jobs.dead_letters import lost_count

        if not yes and not dry_run:
            database = command.database("crmctl dlq discard")
            lost = lost_count(database.begin(read_only=True), reader)
            database.rollback()
            database.close()
            command.confirm(f"Acknowledge that {lost} open letters are gone from {reader.topic.name}?")
        run_job(
            command,
            job.job(reader, operator(), reason),
            job.Options(command.settings.chat_status.dlq_group),
            View(form, _render_acknowledged),
            Plan(drain=True, dry_run=dry_run),
        )


def _filters(
    code: Sequence[str] | None,
    deal: Sequence[UUID] | None,
    tenant: Sequence[UUID] | None,
    key: Sequence[str] | None,
    since: datetime | None,
    until: datetime | None,
    at: Sequence[str] | None,
) -> "Filters":
    from crmctl.domain.dead_letters import Filters

    return Filters(
        codes=frozenset(code or ()),
        deal_ids=frozenset(map(str, deal or ())),
        tenant_ids=frozenset(map(str, tenant or ())),
        keys=frozenset(os.fsencode(text) for text in key or ()),
        ranges=_ranges(at or ()),
        since=since,
        until=until,
    )


def _ranges(texts: Sequence[str]) -> tuple[Any, ...]:
    from crmctl.domain.dead_letters import parse_range

    try:
        return tuple(parse_range(text) for text in texts)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@contextmanager
def _reader(command: "Command") -> "Iterator[TopicReader]":
    from crmctl.cli.readers import open_letters

    reader = open_letters(command)
    try:
        yield reader
    finally:
        reader.close()


@contextmanager
def _bar(reader: "TopicReader") -> "Iterator[Callable[[Progress], None]]":
    """A progress bar, where a person watches."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("dead letters", total=None)
        total = 0

        def advance(progress: "Progress") -> None:
            nonlocal total
            left = reader.total(progress.at or {})
            total = total or left + progress.tried_count
            bar.update(task, total=total, completed=total - left)
            if not progress.more:
                bar.stop()  # before the result is printed

        yield advance


def _count(command: "Command", reader: "TopicReader", filters: "Filters") -> int:
    from crmctl.jobs import list_dead_letters as job

    database = command.database("crmctl dlq discard")
    found = job.query(database.begin(read_only=True), reader, job.Options(filters, limit=1), lambda _: None)
    database.rollback()
    database.close()
    return int(found["open_count"])


_LIST_COLUMNS = ("letter", "state", "code", "failed_at", "replays", "deal_id", "status", "reason")


def _render_summary(document: Mapping[str, Any]) -> str:
    if not document["groups"]:
        return "No dead letters.\n"
    columns = ("count", "code", "reason", "first_failed_at", "last_failed_at")
    return output.table(columns, [[row[column] for column in columns] for row in document["groups"]])


def _render_show(document: Mapping[str, Any]) -> str:
    deal, replayed = document["deal"], document["replay"]
    text = output.fields(
        {
            "Letter": document["letter"],
            "State": document["state"],
            "Code": document["code"],
            "Reason": document["reason"],
            "Failed at": document["failed_at"],
            "Retries before": document["attempts"],
            "Failed replays": document["replays"],
            "Key": document["key"],
            "Source": document["source"] and f"{document['source_topic']} {document['source']}",
            "Deal": document["deal_id"],
            "Deal's chat status": deal["chat_status"] if deal else "the deal is missing",
            "Deal's tenant": deal and deal["tenant_id"],
            "A replay": replayed["outcome"],
            "Because": replayed["reason"],
        }
    )
    if document["resolution"] is not None:
        text += "\nLedger:\n" + output.fields(document["resolution"])
    text += "\nHeaders:\n" + output.table(("header", "value"), document["headers"])
    body = document["envelope"] if document["envelope"] is not None else document.get("value")
    return text + "\nValue:\n" + output.cell(body) + "\n"


def _render_replay(document: Mapping[str, Any]) -> str:
    would = "Would be " if document["dry_run"] else ""
    return output.fields(
        {
            f"{would}applied".capitalize(): document["applied_count"],
            f"{would}stale".capitalize(): document["stale_count"],
            f"{would}duplicate".capitalize(): document["duplicate_count"],
            f"{would}failed again".capitalize(): _tally(document["failed_count"], document["failed"]),
            "Refused, tried too often": document["refused_count"],
            "Left open": _tally(document["open_count"], document["open"]),
            "Lost to retention": document["lost_count"],
            "More to read": document["has_more"],
            "Duration, ms": document["duration_ms"],
        }
    )


def _render_discard(document: Mapping[str, Any]) -> str:
    title = "Would be discarded" if document["dry_run"] else "Discarded"
    return output.fields(
        {
            title: document["discarded_count"],
            "Left open": _tally(document["open_count"], document["open"]),
            "Duration, ms": document["duration_ms"],
        }
    )


def _render_acknowledged(document: Mapping[str, Any]) -> str:
    title = "Would be acknowledged" if document["dry_run"] else "Acknowledged"
    return output.fields({title: document["acknowledged_count"], "Duration, ms": document["duration_ms"]})


def _tally(total: int, by_code: Mapping[str, int]) -> str:
    return f"{total}" + (f" ({', '.join(f'{code} {n}' for code, n in sorted(by_code.items()))})" if by_code else "")
