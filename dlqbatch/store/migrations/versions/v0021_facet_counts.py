"""Triggers count the messages of each group and queue also by error type, event and publisher."""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"

STATES = ("pending", "processing", "resolved", "failed", "manual", "archived")
LISTED = ", ".join(STATES)
FACETS = ("error_type", "event", "source")
KEY = "scope_id, fingerprint, origin_queue"
KEY_OF_FACETS = f"{KEY}, {', '.join(FACETS)}"
LONGEST = 150  # characters, so that a key fits into an index
OF_A_ROW = "scope_id, fingerprint, coalesce(origin_queue, '') AS origin_queue, " + ", ".join(
    f"substr({name}, 1, {LONGEST}) AS {name}" for name in FACETS
)
ADDED = ", ".join(f"{state} = kept.{state} + excluded.{state}" for state in STATES)
ZERO = " AND ".join(f"kept.{state} = 0" for state in STATES)
# Who reads finds a row of no scope once all messages that were there before are in the counts.
# Of the advisory lock that who adds up the changes holds (dlqbatch/store/count_changes.py).
ADDS_UP = 0x646C7163006D7267
IS_COUNTED = f"INSERT INTO dlq_facet_counts ({KEY_OF_FACETS}) SELECT 0, '', '', '', '', ''"


def upgrade() -> None:
    key = ("scope_id", sa.Integer), *((name, sa.Text) for name in KEY_OF_FACETS.split(", ")[1:])
    op.create_table(
        "dlq_facet_counts",
        *(sa.Column(name, kind, primary_key=True, nullable=False, autoincrement=False) for name, kind in key),
        *(sa.Column(name, sa.Integer, nullable=False, server_default=sa.text("0")) for name in STATES),
    )
    for name in FACETS:
        op.add_column("dlq_count_changes", sa.Column(name, sa.Text))
    if op.get_context().dialect.name == "sqlite":
        _sqlite()
    else:
        _postgresql()


def _postgresql() -> None:
    """What is added up leaves the changes: then a trigger adds it up here too, whichever version adds it up.

    The functions work with the rights of their owner, so that logins need none of their own.
    """
    op.execute("ALTER TABLE dlq_facet_counts SET (fillfactor = 70)")
    added = ", ".join(f"nullif(count(*) FILTER (WHERE status = '{state}'), 0)" for state in STATES)
    moved = [f"sum(n) FILTER (WHERE status = '{state}')" for state in STATES]
    columns = f"dlq_count_changes ({KEY_OF_FACETS}, {LISTED})"
    both = f"SELECT {OF_A_ROW}, status, 1 AS n FROM added UNION ALL SELECT {OF_A_ROW}, status, -1 FROM removed"  # noqa: S608
    op.execute(
        f"""
CREATE OR REPLACE FUNCTION dlq_count_messages() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO {columns}
        SELECT {OF_A_ROW}, {added} FROM added GROUP BY 1, 2, 3, 4, 5, 6;
    ELSIF TG_OP = 'UPDATE' THEN
        INSERT INTO {columns}
        SELECT {KEY_OF_FACETS}, {", ".join(f"nullif({each}, 0)" for each in moved)}
        FROM ({both}) AS each GROUP BY {KEY_OF_FACETS}
        HAVING {" OR ".join(f"{each} <> 0" for each in moved)};
        -- The publisher of an erased message stands in no count any more.
        IF EXISTS (SELECT FROM added WHERE erased_at IS NOT NULL) THEN
            PERFORM pg_advisory_xact_lock({ADDS_UP});
            WITH taken AS (
                DELETE FROM dlq_count_changes WHERE source IN (SELECT substr(source, 1, {LONGEST}) FROM removed)
                RETURNING *
            )
            INSERT INTO dlq_counts AS kept ({KEY}, {LISTED})
            SELECT {KEY}, {", ".join(f"coalesce(sum({state}), 0)" for state in STATES)} FROM taken GROUP BY {KEY}
            ON CONFLICT ({KEY}) DO UPDATE SET {ADDED};
        END IF;
    ELSIF TG_OP = 'DELETE' THEN
        INSERT INTO {columns}
        SELECT {OF_A_ROW}, {added.replace("count(*)", "-count(*)")} FROM removed GROUP BY 1, 2, 3, 4, 5, 6;
    ELSE
        DELETE FROM dlq_count_changes;
        DELETE FROM dlq_counts WHERE scope_id <> 0;
        DELETE FROM dlq_facet_counts WHERE scope_id <> 0;
    END IF;
    RETURN NULL;
END
$$"""  # noqa: S608
    )
    named = ", ".join(f"coalesce({name}, '') AS {name}" for name in FACETS)
    op.execute(
        f"""
CREATE OR REPLACE FUNCTION dlq_count_facets() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    INSERT INTO dlq_facet_counts AS kept ({KEY_OF_FACETS}, {LISTED})
    SELECT {KEY}, {named}, {", ".join(f"coalesce(sum({state}), 0)" for state in STATES)}
    FROM removed GROUP BY 1, 2, 3, 4, 5, 6
    ON CONFLICT ({KEY_OF_FACETS}) DO UPDATE SET {ADDED};
    DELETE FROM dlq_facet_counts AS kept USING (SELECT DISTINCT {KEY}, {named} FROM removed) AS gone
    WHERE {" AND ".join(f"kept.{name} = gone.{name}" for name in KEY_OF_FACETS.split(", "))} AND {ZERO};
    RETURN NULL;
END
$$"""  # noqa: S608
    )
    op.execute("REVOKE ALL ON FUNCTION dlq_count_facets() FROM PUBLIC")
    # Else a table that a login makes for itself alone would be found first.
    for function in ("dlq_count_messages", "dlq_count_facets"):
        op.execute(
            f"DO $$ BEGIN EXECUTE 'ALTER FUNCTION {function}() SET search_path = ' || "
            "quote_ident(current_schema()) || ', pg_temp'; END $$"
        )
    op.execute(
        "CREATE TRIGGER dlq_count_changes_added_up AFTER DELETE ON dlq_count_changes "
        "REFERENCING OLD TABLE AS removed FOR EACH STATEMENT EXECUTE FUNCTION dlq_count_facets()"
    )
    # What is there is counted after this transaction, while jobs go on (dlqbatch/store/count_changes.py).
    op.execute(f"{IS_COUNTED} WHERE NOT EXISTS (SELECT FROM dlq_messages)")


def _sqlite() -> None:
    """One program writes at a time here, so that each row is added up at once, in both tables.

    A migration that makes the table of the messages anew loses these triggers, and has to make them again.
    """
    for name in ("insert", "update", "delete"):
        op.execute(f"DROP TRIGGER dlq_messages_count_{name}")
    new = ", ".join(f"NEW.status = '{state}'" for state in STATES)
    sums = ", ".join(f"{state} = {state} + excluded.{state}" for state in STATES)
    less = ", ".join(f"{state} = {state} - (OLD.status = '{state}')" for state in STATES)
    facets = [f"substr(coalesce({{row}}.{name}, ''), 1, {LONGEST})" for name in FACETS]
    add, subtract = "", ""
    for table, key, of_facets in (("dlq_counts", KEY, []), ("dlq_facet_counts", KEY_OF_FACETS, facets)):
        row = "{row}.scope_id", "{row}.fingerprint", "coalesce({row}.origin_queue, '')", *of_facets
        add += f"""
    INSERT INTO {table} ({key}, {LISTED})
    VALUES ({", ".join(row).format(row="NEW")}, {new})
    ON CONFLICT ({key}) DO UPDATE SET {sums};"""  # noqa: S608
        pairs = zip(key.split(", "), row, strict=True)
        is_this = " AND ".join(f"{name} = {value.format(row='OLD')}" for name, value in pairs)
        subtract += f"""
    UPDATE {table} SET {less}
    WHERE {is_this};"""  # noqa: S608
        if of_facets:  # the publisher of an erased message stands in no count any more
            subtract += f"""
    DELETE FROM {table} WHERE {is_this} AND {ZERO.replace("kept.", "")};"""  # noqa: S608
    changed = f"UPDATE OF {KEY_OF_FACETS}, status"
    for event, name, what in (
        ("INSERT", "insert", add),
        (changed, "update", subtract + add),
        ("DELETE", "delete", subtract),
    ):
        op.execute(f"CREATE TRIGGER dlq_messages_count_{name} AFTER {event} ON dlq_messages BEGIN{what}\nEND")
    counted = ", ".join(f"sum(status = '{state}')" for state in STATES)
    rows = ", ".join(("scope_id", "fingerprint", "coalesce(origin_queue, '')", *facets)).replace("{row}.", "")
    op.execute(
        f"INSERT INTO dlq_facet_counts ({KEY_OF_FACETS}, {LISTED}) "  # noqa: S608
        f"SELECT {rows}, {counted} FROM dlq_messages GROUP BY 1, 2, 3, 4, 5, 6"
    )
    op.execute(IS_COUNTED)
