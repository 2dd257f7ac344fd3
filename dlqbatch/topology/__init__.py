"""Exchanges, queues and bindings as data."""
