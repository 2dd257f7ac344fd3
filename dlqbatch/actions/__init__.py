"""What people did: list the actions, show one with all its messages, and undo it."""
