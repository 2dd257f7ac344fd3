"""Private servers for tests and for the demo: standard library only, because they run before anything is installed.

server     one process with all it forks: start, stop, kill, restart; nothing outlives the program that started it
rabbitmq   a RabbitMQ node with its own epmd
rabbitmq43 RabbitMQ 4.3 beside the installed one, fetched and unpacked once
cluster    three RabbitMQ nodes, joined
postgres   a PostgreSQL cluster
management the HTTP API of RabbitMQ's management plugin
amqp       does a broker let this user in?
guard      the process that ends what a killed program left running

Linux only: it reads /proc.
"""
