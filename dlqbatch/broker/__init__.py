"""RabbitMQ through pika: the only place that knows it."""
