"""Delete what has been kept long enough, or move it to cold storage; and bring it back from there."""
