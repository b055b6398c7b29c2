"""Named SQL statements: `sql/<file>.sql` holds blocks that start with `-- name: <name>`.

The comment lines under a name say what the statement is for and which index it counts on. Parameters are
psycopg's `%(name)s`; `{name}` stands for an identifier or literal of ours that is filled in at import.
"""

import re
from functools import cache
from importlib.resources import files

_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


@cache
def load(file: str) -> dict[str, str]:
    """Read `sql/<file>.sql` and return its statements by name, without the comment lines."""
    text = (files(__name__) / f"{file}.sql").read_text(encoding="utf-8")
    parts = _NAME.split(text)
    return {
        name: "\n".join(line for line in body.splitlines() if line.strip() and not line.startswith("--"))
        for name, body in zip(parts[1::2], parts[2::2], strict=True)
    }
