"""A rendezvous backend of one's own: its state in a SQLite file that all agents can open.

Import it before the launch; then `--rdzv-backend sqlite --rdzv-endpoint /shared/rendezvous.db`.
"""

import sqlite3
from contextlib import closing

from elastane.elastic.rendezvous import RendezvousConnectionError, rendezvous_handler_registry
from elastane.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, create_handler

TABLE = "CREATE TABLE IF NOT EXISTS states (run TEXT PRIMARY KEY, state BLOB, token INTEGER)"


class SqliteBackend(RendezvousBackend):
    name = "sqlite"

    def __init__(self, path, run_id):
        self.path, self.run_id = path, run_id

    def ask(self, sql, *values):
        try:
            with closing(sqlite3.connect(self.path, timeout=3)) as file, file:
                file.execute(TABLE)
                cursor = file.execute(sql, values)
                return cursor.fetchone() if cursor.description else cursor.rowcount
        except sqlite3.Error as error:
            raise RendezvousConnectionError(f"{self.path}: {error}") from error

    def get_state(self):
        return self.ask("SELECT state, token FROM states WHERE run = ?", self.run_id)

    def set_state(self, state, token=None):
        if token is None:
            sql, values = "INSERT OR IGNORE INTO states VALUES (?, ?, 1)", (self.run_id, state)
        else:
            sql = "UPDATE states SET state = ?, token = token + 1 WHERE run = ? AND token = ?"
            values = (state, self.run_id, token)
        if self.ask(sql, *values) == 1:
            return state, (token or 0) + 1, True
        return (*self.get_state(), False)


def create(params):
    return create_handler(None, SqliteBackend(params.endpoint, params.run_id), params)


def handler():
    return create  # what an entry point of the group torchrun.handlers names


rendezvous_handler_registry.register("sqlite", create)
