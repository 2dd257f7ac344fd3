"""Measure the dead store and the queues, fire and resolve alerts, and tell whoever has to know."""
