"""The dead letters' side of `doctor` and `status`: how many are open. Reads only, joins no group.

What keeps them from being counted is a fault of PostgreSQL or Kafka, which other checks name: this one is skipped then.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import psycopg

from crmctl.adapters.postgres import Database
from crmctl.adapters.topic_reader import TopicReader
from crmctl.domain.errors import CrmctlError
from crmctl.domain.health import ok, skipped, warning
from crmctl.jobs import list_dead_letters
from crmctl.jobs.examine import Part

CHECKS: Final = ("dead-letters",)


@dataclass(frozen=True, slots=True)
class LetterFigures:
    """Letters that are open, and those that nobody closed before the topic lost them."""

    open_count: int
    lost_count: int


@dataclass(frozen=True, slots=True)
class Look:
    """How to look: a connection of its own, and the topic's reader on demand."""

    database: Database
    reader: Callable[[], TopicReader]


def examine_dead_letters(part: Part, look: Look) -> None:
    """Fill in the check, and the figures `dead_letters`."""
    [name] = CHECKS
    try:
        reader = look.reader()
        try:
            tx = look.database.begin(read_only=True)
            found = list_dead_letters.query(tx, reader, list_dead_letters.Options(limit=1), lambda _: None)
        finally:
            reader.close()
            look.database.close()
    except (psycopg.Error, CrmctlError):
        part.add(skipped(name, "they cannot be counted now; see the other checks"))
        return
    letters = LetterFigures(found["open_count"], found["lost_count"])
    part.figures["dead_letters"] = letters
    if letters.open_count or letters.lost_count:
        lost = f", {letters.lost_count} were lost to retention" if letters.lost_count else ""
        fix = "look at them: crmctl dlq list --summary"
        if letters.lost_count:
            fix += "; acknowledge what is lost: crmctl dlq discard --lost --reason TEXT"
        part.add(warning(name, f"{letters.open_count} are open{lost}", fix))
    else:
        part.add(ok(name, "none is open"))
