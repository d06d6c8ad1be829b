"""An sqlite export of Nsight Systems as tables that may be absent, lack columns or be damaged."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

NAME_LIMIT = 4096  # characters of a kernel's name or an NVTX text; C++ names may be far longer than they tell
ROWS_LIMIT = 20_000_000  # some 2 GB of times
_VALUE_LIMIT = 1 << 20  # bytes of one value, and of a row


class Tables:
    """The tables of one file. Reading a table that is damaged or too long ends early; ``ended`` says which and why."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._columns: dict[str, frozenset[str]] = {}
        self.ended: dict[str, str] = {}

    def has(self, table: str, *columns: str) -> bool:
        """Whether the file has a table with these columns."""
        found = self._columns_of(table)
        return bool(found) and found.issuperset(columns)

    def rows(self, table: str, columns: tuple[str, ...]) -> Iterator[tuple[Any, ...]]:
        """The rows in the order of the file, None for a column that the table lacks; none without the table."""
        found = self._columns_of(table)
        if not found:
            return
        chosen = ", ".join(f'"{name}"' if name in found else "NULL" for name in columns)
        try:
            rows = self._connection.execute(f'SELECT {chosen} FROM "{table}" LIMIT {ROWS_LIMIT + 1}')
            for place, row in enumerate(rows):
                if place == ROWS_LIMIT:
                    self.ended[table] = f"it has more than {ROWS_LIMIT} rows"
                    return
                yield row
        except (sqlite3.Error, OverflowError) as error:
            self.ended[table] = str(error)

    def _columns_of(self, table: str) -> frozenset[str]:
        """None of a view, which could compute without end, or of a virtual table, which runs code."""
        if table not in self._columns:
            kind = self._connection.execute(
                "SELECT 1 FROM sqlite_master WHERE name = ? AND type = 'table' AND rootpage > 0",
                (table,),
            )
            described = self._connection.execute(f'PRAGMA table_info("{table}")') if kind.fetchone() else ()
            self._columns[table] = frozenset(str(column[1]) for column in described)
        return self._columns[table]


@contextmanager
def open_read_only(path: Path, progress: Callable[[int], None] | None = None) -> Iterator[Tables]:
    """The tables of an sqlite file, which is neither changed nor locked; views and code in it are not run.

    Raises:
        sqlite3.Error: it is no database, or a damaged one.
    """
    address = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
    with closing(sqlite3.connect(address, uri=True)) as connection:
        if sys.version_info >= (3, 11):
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _VALUE_LIMIT)
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.text_factory = lambda value: value.decode("utf-8", "replace")[:NAME_LIMIT]
        yield Tables(connection)
