"""Triggers keep how many messages of each group and queue are in each state, whichever program writes them."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"

STATES = ("pending", "processing", "resolved", "failed", "manual", "archived")
LISTED = ", ".join(STATES)
KEY = "scope_id, fingerprint, origin_queue"
OF_A_ROW = "scope_id, fingerprint, coalesce(origin_queue, '') AS origin_queue"
# Who reads finds a row of no scope once all messages that were there before the triggers are in the counts.
IS_COUNTED = f"INSERT INTO dlq_counts ({KEY}) SELECT 0, '', ''"


def upgrade() -> None:
    key = ("scope_id", sa.Integer), ("fingerprint", sa.Text), ("origin_queue", sa.Text)
    op.create_table(
        "dlq_counts",
        *(sa.Column(name, kind, primary_key=True, nullable=False, autoincrement=False) for name, kind in key),
        *(sa.Column(name, sa.Integer, nullable=False, server_default=sa.text("0")) for name in STATES),
    )
    op.create_table(
        "dlq_count_changes",
        *(sa.Column(name, kind, nullable=False) for name, kind in key),
        *(sa.Column(name, sa.Integer) for name in STATES),
    )
    if op.get_context().dialect.name == "sqlite":
        _sqlite()
    else:
        _postgresql()


def _postgresql() -> None:
    """Each statement appends what it changes, so that no job waits for another one; a monitor adds it up.

    The function works with the rights of its owner, so that logins need none of their own.
    """
    op.execute("ALTER TABLE dlq_counts SET (fillfactor = 70)")
    # A key would be one more thing to write; without one, logical replication would refuse that rows are deleted.
    op.execute("ALTER TABLE dlq_count_changes REPLICA IDENTITY FULL")
    added = ", ".join(f"nullif(count(*) FILTER (WHERE status = '{state}'), 0)" for state in STATES)
    moved = [f"sum(n) FILTER (WHERE status = '{state}')" for state in STATES]
    columns = f"dlq_count_changes ({KEY}, {LISTED})"
    both = f"SELECT {OF_A_ROW}, status, 1 AS n FROM added UNION ALL SELECT {OF_A_ROW}, status, -1 FROM removed"  # noqa: S608
    op.execute(
        f"""
CREATE OR REPLACE FUNCTION dlq_count_messages() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO {columns}
        SELECT {OF_A_ROW}, {added} FROM added GROUP BY 1, 2, 3;
    ELSIF TG_OP = 'UPDATE' THEN
        INSERT INTO {columns}
        SELECT {KEY}, {", ".join(f"nullif({each}, 0)" for each in moved)}
        FROM ({both}) AS each GROUP BY {KEY}
        HAVING {" OR ".join(f"{each} <> 0" for each in moved)};
    ELSIF TG_OP = 'DELETE' THEN
        INSERT INTO {columns}
        SELECT {OF_A_ROW}, {added.replace("count(*)", "-count(*)")} FROM removed GROUP BY 1, 2, 3;
    ELSE
        DELETE FROM dlq_count_changes;
        DELETE FROM dlq_counts WHERE scope_id <> 0;
    END IF;
    RETURN NULL;
END
$$"""  # noqa: S608
    )
    op.execute("REVOKE ALL ON FUNCTION dlq_count_messages() FROM PUBLIC")
    # Else a table that a login makes for itself alone would be found first.
    op.execute(
        "DO $$ BEGIN EXECUTE 'ALTER FUNCTION dlq_count_messages() SET search_path = ' || "
        "quote_ident(current_schema()) || ', pg_temp'; END $$"
    )
    for word, tables in {
        "INSERT": "REFERENCING NEW TABLE AS added ",
        "UPDATE": "REFERENCING NEW TABLE AS added OLD TABLE AS removed ",
        "DELETE": "REFERENCING OLD TABLE AS removed ",
        "TRUNCATE": "",
    }.items():
        op.execute(
            f"CREATE TRIGGER dlq_messages_count_{word.lower()} AFTER {word} ON dlq_messages {tables}"
            "FOR EACH STATEMENT EXECUTE FUNCTION dlq_count_messages()"
        )
    # What is there is counted after this transaction, while jobs go on (dlqbatch/store/counts.py).
    op.execute(f"{IS_COUNTED} WHERE NOT EXISTS (SELECT FROM dlq_messages)")


def _sqlite() -> None:
    """One program writes at a time here, so that each row is added up at once.

    A migration that makes the table of the messages anew loses these triggers, and has to make them again.
    """
    new = ", ".join(f"NEW.status = '{state}'" for state in STATES)
    add = f"""
    INSERT INTO dlq_counts ({KEY}, {LISTED})
    VALUES (NEW.scope_id, NEW.fingerprint, coalesce(NEW.origin_queue, ''), {new})
    ON CONFLICT ({KEY}) DO UPDATE SET {", ".join(f"{state} = {state} + excluded.{state}" for state in STATES)};"""  # noqa: S608
    subtract = f"""
    UPDATE dlq_counts SET {", ".join(f"{state} = {state} - (OLD.status = '{state}')" for state in STATES)}
    WHERE scope_id = OLD.scope_id AND fingerprint = OLD.fingerprint
        AND origin_queue = coalesce(OLD.origin_queue, '');"""  # noqa: S608
    changed = f"UPDATE OF {KEY}, status"
    for event, name, what in (
        ("INSERT", "insert", add),
        (changed, "update", subtract + add),
        ("DELETE", "delete", subtract),
    ):
        op.execute(f"CREATE TRIGGER dlq_messages_count_{name} AFTER {event} ON dlq_messages BEGIN{what}\nEND")
    counted = ", ".join(f"sum(status = '{state}')" for state in STATES)
    op.execute(
        f"INSERT INTO dlq_counts ({KEY}, {LISTED}) SELECT {OF_A_ROW}, {counted} FROM dlq_messages GROUP BY 1, 2, 3"  # noqa: S608
    )
    op.execute(IS_COUNTED)
