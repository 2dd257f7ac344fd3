"""Exchanges, queues and bindings that the settings describe: declared, compared, changed and deleted."""
