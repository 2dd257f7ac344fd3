"""Retry dead messages by rules: claim what is due, send it, and find out whether the retry succeeded."""
