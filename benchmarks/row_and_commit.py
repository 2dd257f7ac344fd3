"""What most people write first: get a message, insert its row, commit, acknowledge.

It reads no header, recognises no message that comes again, groups nothing, and its table has one index.
"""

from __future__ import annotations

import json
import time
from contextlib import closing

import psycopg
from contest import Sample
from workload import connect

TABLE = """
    CREATE TABLE bench_rows (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, queue text NOT NULL, exchange text NOT NULL,
        routing_key text NOT NULL, message_id text, headers jsonb, body bytea NOT NULL,
        created_at timestamptz NOT NULL DEFAULT now()
    )
"""
_ROW = (
    b"INSERT INTO bench_rows (queue, exchange, routing_key, message_id, headers, body) VALUES (%s, %s, %s, %s, %s, %s)"
)


def run(broker_url: str, database_url: str, queue: str, number: int) -> Sample:
    started, busy = time.perf_counter(), time.process_time()
    with closing(connect(broker_url)) as broker, psycopg.connect(database_url) as database:
        channel = broker.channel()
        for _ in range(number):
            method, found, body = channel.basic_get(queue)
            headers = json.dumps(found.headers, default=str)
            database.execute(_ROW, (queue, method.exchange, method.routing_key, found.message_id, headers, body))
            database.commit()
            channel.basic_ack(method.delivery_tag)
    busy, elapsed = time.process_time() - busy, time.perf_counter() - started
    return Sample(number / elapsed, busy / number * 1e6)
