"""Decisions without I/O: what is to become of a message, and which events are configured."""
