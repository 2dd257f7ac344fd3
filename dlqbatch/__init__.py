"""The journey of a message through dlqbatch.

    origin queue --(fails, dead-letters)--> retry-queue
         ^                                       |  drain: broker.fetch -> message.envelope -> policy.decide
         |                                       |         -> message.stamp -> broker.publish -> confirm -> ack
         |                  retries left         v                       exhausted, not configured, malformed
    retry-queue-N <--(TTL)-- queue.delay.N <-----+------------------------------> dlq-queue

Rooms, downhill only: cli -> wiring -> settings, runs, broker, deadstore -> policy, topology -> message -> errors.
"""
