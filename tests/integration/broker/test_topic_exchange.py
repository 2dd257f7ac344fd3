"""`matches` beside the only authority: a topic exchange."""

from __future__ import annotations

import random

import pika

from dlqbatch.amqp.patterns import TopicTrie, matches

EDGES = [
    "",
    "#",
    "*",
    ".",
    "..",
    "*.*",
    "#.#",
    "*.#",
    "#.*",
    "#.*.#",
    "a.#",
    "#.b",
    "a.#.c",
    "a.*.b",
    "a..b",
    "a.",
    ".a",
]
EDGES += [".#", "#.", "*.", ".*", "a*", "#a", "**", "ä.#", "*.ß.日本", "a.#.#.b", "#.a.#.a.#", "a.#.b.#", " a", "A"]
KEYS = [
    "a",
    "b",
    "c",
    "a.b",
    "a.c",
    "a.b.c",
    "b.a.c.a",
    "a.b.a.b",
    ".b",
    "ä",
    "ä.ö",
    "x.ß.日本",
    "ab",
    "a.#",
    "x.#.y",
    "a ",
    ".",
]
MOST_HASHES = 2
WORDS = ["a", "b", "c", "", "*", "#", "é"]


def generated(dice: random.Random, how_many: int) -> list[str]:
    return [".".join(dice.choices(WORDS, k=dice.randint(1, 6))) for _ in range(how_many)]


def test_the_broker_agrees_about_every_pattern_and_key(broker_url: str) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")  # noqa: T201 - pytest shows it when the test fails
    dice = random.Random(seed)
    # From 4.3 the broker takes at most two `#` in a pattern; more are compared with a slow matcher in the unit tests.
    patterns = sorted(each for each in {*EDGES, *generated(dice, 60)} if each.split(".").count("#") <= MOST_HASHES)
    keys = sorted({*EDGES, *KEYS, *generated(dice, 60), ".".join("a" * 128)})

    with pika.BlockingConnection(pika.URLParameters(broker_url)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.exchange_declare("topics", "topic")
        queues = {}
        for pattern in patterns:
            queues[pattern] = channel.queue_declare("", exclusive=True).method.queue
            channel.queue_bind(queues[pattern], "topics", pattern)
        for key in keys:
            channel.basic_publish("topics", key, key.encode())
        routed = {pattern: drained(channel, queue) for pattern, queue in queues.items()}

    assert routed == {pattern: {key for key in keys if matches(pattern, key)} for pattern in patterns}
    trie = TopicTrie(patterns)
    for key in keys:
        assert set(trie.matching(key)) == {pattern for pattern in patterns if key in routed[pattern]}


def drained(channel: pika.adapters.blocking_connection.BlockingChannel, queue: str) -> set[str]:
    count = channel.queue_declare(queue, passive=True).method.message_count
    bodies = [channel.basic_get(queue, auto_ack=True)[2] for _ in range(count)]
    return {body.decode() for body in bodies if body is not None}
