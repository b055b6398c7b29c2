"""`crmctl topics …`: create the topics that crmctl writes to, and hold them against their contracts."""

from collections.abc import Mapping, Sequence
from typing import Any

import typer

from crmctl.cli import output
from crmctl.cli.options import Output

app = typer.Typer(help="The Kafka topics.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def check(form: Output = output.Format.TABLE) -> None:
    """Compare the topics with their contracts: exit 0, or 78 when one is missing or falls short.

    \b
    Example:
      crmctl topics check -o json
    """
    from crmctl.cli.command import Command

    with Command(form) as command:
        from crmctl.adapters import kafka, topics
        from crmctl.cli.exits import Exit
        from crmctl.domain.topics import faults, ours

        contracts = ours(command.settings.chat_status.dlq_topic)
        found = topics.read(kafka.admin(command.settings.kafka, command.log), contracts)
        rows = [
            {
                "topic": topic.name,
                "partitions": found[topic.name].partitions,
                "faults": faults(topic, found[topic.name].partitions, found[topic.name].config),
            }
            for topic in contracts
        ]
        command.report({"topics": rows}, _render_check)
        if any(row["faults"] for row in rows):
            command.log.error("topics fall short of their contracts", hint=_hint(rows))
            command.exit(Exit.CONFIGURATION)


@app.command()
def create(form: Output = output.Format.TABLE) -> None:
    """Create the topics that do not exist. One that exists is never changed; `topics check` says what to change.

    \b
    Example:
      crmctl topics create
    """
    from crmctl.cli.command import Command

    with Command(form) as command:
        from crmctl.adapters import kafka, topics
        from crmctl.domain.topics import ours

        contracts = ours(command.settings.chat_status.dlq_topic)
        created = topics.create(kafka.admin(command.settings.kafka, command.log), contracts)
        command.report({"created": created}, _render_create)


def _hint(rows: Sequence[Mapping[str, Any]]) -> str:
    steps = []
    if any(row["partitions"] is None for row in rows):
        steps.append("run: crmctl topics create")
    if falling := [row["topic"] for row in rows if row["faults"] and row["partitions"] is not None]:
        steps.append(f"change with Kafka's tools (kafka-topics.sh, kafka-configs.sh): {', '.join(falling)}")
    return "; ".join(steps)


def _render_check(document: Mapping[str, Any]) -> str:
    rows = [(row["topic"], row["partitions"], "; ".join(row["faults"]) or "ok") for row in document["topics"]]
    return output.table(("topic", "partitions", "state"), rows)


def _render_create(document: Mapping[str, Any]) -> str:
    return "".join(f"created {name}\n" for name in document["created"]) or "nothing to do\n"
