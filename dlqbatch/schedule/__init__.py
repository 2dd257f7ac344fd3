"""`dlqbatch schedule`: jobs on their own intervals, more drains for a deep queue, and an endpoint for its health."""
