"""RabbitMQ: connections, taking and publishing messages through pika, and what the management API reports."""
