"""The `monitor` job: it measures the dead store and the queues, fires and resolves alerts, and sends them."""
