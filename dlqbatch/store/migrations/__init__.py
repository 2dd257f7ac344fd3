"""Alembic's side of the schema; `dlqbatch.store.migrate` drives it."""
