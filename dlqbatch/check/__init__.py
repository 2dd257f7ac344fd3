"""Look at every message of some queues once, and move those that have failed too often."""
