"""Commits rows until it is killed, and notes the number of each that is committed.

    sqlite_writer.py DATABASE ACKNOWLEDGED MODE
"""

import sqlite3
import sys

from applications import content_of

database, acknowledged, mode = sys.argv[1:]
connection = sqlite3.connect(database, timeout=60)
assert connection.execute(f"PRAGMA journal_mode={mode}").fetchone()[0].upper() == mode
connection.execute("PRAGMA synchronous=FULL")
connection.execute("CREATE TABLE IF NOT EXISTS rows (number INTEGER PRIMARY KEY, content BLOB)")
number = (connection.execute("SELECT max(number) FROM rows").fetchone()[0] or 0) + 1
with open(acknowledged, "a") as note:
    while True:
        with connection:
            connection.execute("INSERT INTO rows VALUES (?, ?)", (number, content_of(number)))
        note.write(f"{number}\n")
        note.flush()
        number += 1
