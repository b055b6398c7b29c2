"""What reaches the terminal: the result on stdout, once, as a table or as one JSON document.

Data is printed as it is: no markup is read out of it, nothing is wrapped, and a stdout that cannot show a
character gets its escape instead of a crash.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, TextIO

# What Rows keep in memory before they go to a file.
_ROWS_IN_MEMORY_BYTES = 16 * 1024 * 1024


class Format(StrEnum):
    """The values of `-o`."""

    TABLE = "table"
    JSON = "json"


class OutputError(Exception):
    """The result could not be written to stdout; whatever the command committed stays committed."""


def prepare_streams() -> None:
    """Make both streams write any text, whatever the locale's encoding is."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def write_json(document: object, *, one_line: bool = False) -> None:
    """Write one JSON document and a line feed."""
    write(_json(document, one_line=one_line) + "\n")


def _json(document: object, *, one_line: bool) -> str:
    import orjson

    text = orjson.dumps(document, default=str, option=0 if one_line else orjson.OPT_INDENT_2).decode()
    if not _is_utf8(sys.stdout):
        import json

        # \uXXXX is JSON; the stream's own escape for a character that it cannot show is not.
        text = json.dumps(json.loads(text), indent=None if one_line else 2, ensure_ascii=True)
    return text


def write(text: str) -> None:
    """Write text to stdout and flush it.

    A reader that has gone away (`| head -1`) is no error; a full disk or a closed stdout raises OutputError.
    """
    if sys.stdout is None:
        raise OutputError("stdout is closed")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        _abandon_stdout()
    except OSError as error:
        _abandon_stdout()
        raise OutputError(error.strerror or "write failed") from None


class Rows:
    """Rows that may be too many for memory: they wait in a temporary file until all are there, and are then printed.

    So a failure half-way leaves no half of a document, and a table's columns are as wide as their widest cell.
    """

    def __init__(self, columns: Sequence[str]) -> None:
        from tempfile import SpooledTemporaryFile

        self._columns = columns
        self._widths = [len(column) for column in columns]
        self._count = 0
        self._file = SpooledTemporaryFile(max_size=_ROWS_IN_MEMORY_BYTES)  # noqa: SIM115  closed with us

    def add(self, row: Mapping[str, Any]) -> None:
        """Keep a row; JSON scalars only."""
        import orjson
        from rich.cells import cell_len

        self._count += 1
        self._file.write(orjson.dumps(row) + b"\n")
        for index, column in enumerate(self._columns):
            self._widths[index] = max(self._widths[index], cell_len(cell(row[column])))

    def write(self, form: Format, name: str, rest: Mapping[str, Any]) -> None:
        """Print the rows under `name` and the document's other fields, as a table or as one JSON document."""
        if form is Format.JSON:
            write(f'{{\n  "{name}": [')
            for number, chunk in enumerate(self._chunks()):
                lines = ",\n    ".join(_json(row, one_line=True) for row in chunk)
                write(("\n    " if number == 0 else ",\n    ") + lines)
            write(
                "\n  ]"
                + "".join(
                    f",\n  {_json(key, one_line=True)}: {_json(value, one_line=True)}" for key, value in rest.items()
                )
                + "\n}\n"
            )
            return
        if not self._count:
            write(f"No {name}.\n")
            return
        write(self._line([column.upper() for column in self._columns]))
        for chunk in self._chunks():
            write("".join(self._line([cell(row[column]) for column in self._columns]) for row in chunk))

    def _chunks(self) -> Iterator[list[dict[str, Any]]]:
        from itertools import islice

        import orjson

        self._file.seek(0)
        while lines := list(islice(self._file, 1000)):
            yield [orjson.loads(line) for line in lines]

    def _line(self, cells: Sequence[str]) -> str:
        from rich.cells import cell_len

        padded = (text + " " * (width - cell_len(text)) for text, width in zip(cells, self._widths, strict=True))
        return "  ".join(padded).rstrip() + "\n"


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Lay rows out under their column names, each column as wide as its widest cell."""
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    for column in columns:
        grid.add_column(Text(column.upper()), no_wrap=True, overflow="ignore")
    for row in rows:
        grid.add_row(*(Text(cell(value)) for value in row))
    return _render(grid)


def fields(pairs: Mapping[str, object]) -> str:
    """Lay name and value pairs out, one a line."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(2):
        grid.add_column(no_wrap=True, overflow="ignore")
    for name, value in pairs.items():
        grid.add_row(Text(name), Text(cell(value)))
    return _render(grid)


def cell(value: object) -> str:
    """One value as a person reads it, on one line."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        import json

        return json.dumps(value, ensure_ascii=False)
    return " ".join(str(value).splitlines())


def _render(grid: Any) -> str:
    from io import StringIO

    from rich.console import Console

    buffer = StringIO()
    Console(file=buffer, width=100_000, color_system=None, highlight=False, markup=False, emoji=False).print(grid)
    return "".join(line.rstrip() + "\n" for line in buffer.getvalue().splitlines())


def _is_utf8(stream: TextIO | None) -> bool:
    return stream is not None and (stream.encoding or "").lower().replace("-", "") == "utf8"


def _abandon_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush cannot fail a second time."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)
