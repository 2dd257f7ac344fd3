"""Bring messages from dead-letter queues into the dead store, with the reason and the group of each failure."""
