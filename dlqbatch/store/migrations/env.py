"""Alembic runs this file; the caller has opened the transaction, or asked for SQL as text."""

from alembic import context

VERSION_TABLE = "dlqbatch_version"

if context.is_offline_mode():
    context.configure(
        dialect_name=context.config.attributes["dialect"],
        version_table=VERSION_TABLE,
        transactional_ddl=True,
        literal_binds=True,
    )
else:
    context.configure(
        connection=context.config.attributes["connection"], version_table=VERSION_TABLE, transactional_ddl=True
    )

with context.begin_transaction():
    context.run_migrations()
