"""The journey of a message through dlqbatch.

    origin queue --(fails, dead-letters)--> retry-queue
         ^                                       |  drain: broker.fetch -> amqp.envelope -> drain.decide
         |                                       |         -> amqp.stamp -> broker.publisher -> confirm -> ack
         |                  retries left         v                       exhausted, not configured, malformed
    retry-queue-N <--(TTL)-- queue.delay.N <-----+------------------------------> dlq-queue

Folders, downhill only: cli -> schedule, demo -> the jobs and commands -> broker, store, aws -> settings -> amqp.
"""

__version__ = "0.1.0"
"""The version of the package: pyproject.toml reads it here, and a test compares the files in deploy/ with it."""
