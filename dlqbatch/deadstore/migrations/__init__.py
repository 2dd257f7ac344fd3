"""Alembic's side of the schema; `dlqbatch.deadstore.migrate` drives it."""
