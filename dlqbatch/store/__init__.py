"""The database: the policy's table and its migrations (SQLAlchemy Core; PostgreSQL through psycopg, or SQLite)."""
