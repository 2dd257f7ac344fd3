"""Deliberate faults, one line of the program each, and the smallest part of the suite that has to notice it.

A text that is no longer in its file, or is there twice, fails `tests/unit/test_mutations.py`: mend it here by copying
the line as it is now. What a fault breaks is said as a user would see it.
"""

from __future__ import annotations

from typing import NamedTuple


class Change(NamedTuple):
    file: str
    old: str
    """Exactly once in the file."""
    new: str


class Mutation(NamedTuple):
    name: str
    breaks: str
    changes: tuple[Change, ...]
    tests: tuple[str, ...]
    """Files or single tests, as pytest takes them."""


def _one(name: str, breaks: str, file: str, old: str, new: str, *tests: str) -> Mutation:
    return Mutation(name, breaks, (Change(f"dlqbatch/{file}", old, new),), tuple(f"tests/{test}" for test in tests))


MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "ack-before-confirm",
        "a message is acknowledged when it is sent; a broker that did not take it has lost it",
        (
            Change(
                "dlqbatch/broker/transfer.py",
                "            self._publisher.send(delivery, instruction)\n",
                "            delivery.receipt.settle(delivery.tag)\n"
                "            self._publisher.send(delivery, instruction)\n",
            ),
            Change(
                "dlqbatch/broker/transfer.py",
                "        self._count(delivery, publish.counts_as, publish.reason)\n"
                "        delivery.receipt.settle(delivery.tag)\n",
                "        self._count(delivery, publish.counts_as, publish.reason)\n",
            ),
        ),
        (
            "tests/integration/test_transfer.py::test_a_broker_that_takes_no_publishes_is_waited_for_and_then_left",
            "tests/integration/test_publisher.py::test_a_full_queue_that_rejects_leaves_the_rest_unconfirmed",
        ),
    ),
    _one(
        "ignored-return",
        "a message that no queue takes counts as delivered, and is acknowledged",
        "broker/publisher.py",
        "                self._returned.add(sequence)\n",
        "                pass\n",
        "integration/test_publisher.py::test_an_unroutable_message_is_left_while_its_neighbours_move",
    ),
    _one(
        "mandatory-off",
        "the broker drops what it cannot route, and says nothing",
        "broker/frames.py",
        'b"%b\\x00\\x00%c%b%c%b\\x01\\xce"',
        'b"%b\\x00\\x00%c%b%c%b\\x00\\xce"',
        "integration/test_publisher.py::test_an_unroutable_message_is_left_while_its_neighbours_move",
    ),
    _one(
        "nack-taken-as-confirm",
        "a message that a full queue refused is acknowledged",
        "broker/publisher.py",
        "buffer[start + 12] & 1, taken=False)",
        "buffer[start + 12] & 1, taken=True)",
        "integration/test_publisher.py::test_a_full_queue_that_rejects_leaves_the_rest_unconfirmed",
    ),
    _one(
        "confirm-of-many-answers-one",
        "of a confirm of many only the last counts: what was moved is left as well, and is there twice",
        "broker/publisher.py",
        "        if not multiple:\n",
        "        if True:\n",
        "integration/test_publisher.py::test_confirms_in_multiples_and_out_of_order_settle_each_message_once",
    ),
    _one(
        "held-message-acked",
        "what had to stay is acknowledged, and gone",
        "broker/receiving.py",
        "        self._wire.put(frames.requeue_all(self._number))\n",
        "        self._wire.put(frames.ack(self._number, 0, multiple=True))\n",
        "integration/test_fetch.py::test_what_is_held_stays_and_nothing_else_does",
    ),
    _one(
        "dropped-requeue",
        "what stays is put back by closing the channel alone, which counts as a delivery and turns the order round",
        "broker/receiving.py",
        "        self._wire.put(frames.requeue_all(self._number))\n",
        "",
        "integration/test_put_back.py",
    ),
    _one(
        "ack-past-a-held-message",
        "an acknowledgement of many reaches past a message that has to stay",
        "broker/receiving.py",
        "        self._holding = True\n",
        "        self._prefix = max(self._prefix, tag)\n",
        "integration/test_fetch.py::test_what_is_held_stays_and_nothing_else_does",
    ),
    _one(
        "limit-ignored",
        "a run takes more than its bound",
        "broker/fetch.py",
        "        more = min(room, self.limit - self.taken - self._asked)\n",
        "        more = room\n",
        "integration/test_fetch.py::test_the_limit_is_kept_and_the_rest_was_never_delivered",
    ),
    _one(
        "time-ignored",
        "a run does not end at its bound on seconds",
        "broker/transfer.py",
        "        elif is_taking and time.monotonic() >= self._bounds.stop_at:\n",
        "        elif False:\n",
        "acceptance/test_bounds.py::test_taking_ends_at_max_seconds",
    ),
    _one(
        "what-comes-back-counts",
        "a run takes what comes back while it works: a consumer that rejects everything keeps it alive",
        "runs/drain.py",
        "takes = {queue: limit for queue, limit in share(",
        "takes = {queue: self.max_messages for queue, limit in share(",
        "acceptance/test_exact_bounds.py::test_what_comes_back_while_a_run_works_waits_for_the_next_run",
    ),
    Mutation(
        "commit-after-ack",
        "ingest acknowledges before its rows are committed: a failed commit loses them",
        (
            Change(
                "dlqbatch/broker/transfer.py",
                "        try:\n            with self._connection.goes_on():\n",
                "        for delivery, _ in batch:\n            delivery.receipt.settle(delivery.tag)\n"
                "        try:\n            with self._connection.goes_on():\n",
            ),
            Change(
                "dlqbatch/broker/transfer.py",
                "            self._count(delivery, counts_as, reason)\n"
                "            delivery.receipt.settle(delivery.tag)\n",
                "            self._count(delivery, counts_as, reason)\n",
            ),
        ),
        (
            (
                "tests/integration/test_transfer.py::"
                "test_a_batch_is_acknowledged_after_it_was_stored_and_put_back_if_it_was_not"
            ),
        ),
    ),
    _one(
        "loss-beside-the-store",
        "ingest takes acknowledgements for seen that were never sent: the broker went away beside the last batch",
        "broker/transfer.py",
        "                self._store_batch()\n                self._connection.check()\n",
        "                self._store_batch()\n",
        "integration/test_storing.py::"
        "test_the_broker_that_goes_away_beside_the_last_batch_is_not_taken_to_have_seen_its_acknowledgements",
    ),
    _one(
        "x-death-kept",
        "the broker's deaths are republished: RabbitMQ 3 drops an expired message as a cycle",
        "message/headers.py",
        "BROKERS: Final = (*_OF_DEATHS, *_OF_DELIVERY)\n",
        "BROKERS: Final = _OF_DELIVERY\n",
        "unit/test_stamp.py",
    ),
    _one(
        "cc-kept",
        "a republished CC routes copies to other queues",
        "message/headers.py",
        '_OF_DELIVERY: Final = (b"CC", b"BCC", ',
        "_OF_DELIVERY: Final = (",
        "unit/test_stamp.py",
    ),
    _one(
        "expiration-kept",
        "a dead message is published with an expiration, and vanishes",
        "message/properties.py",
        "        dropped = _EXPIRATION | (0 if keeps_user else _USER_ID)\n",
        "        dropped = 0 if keeps_user else _USER_ID\n",
        "unit/test_properties.py",
    ),
    _one(
        "not-persistent",
        "a message does not survive a restart of the broker",
        "message/properties.py",
        '_PERSISTENT: Final = b"\\x02"',
        '_PERSISTENT: Final = b"\\x01"',
        "unit/test_properties.py",
    ),
    _one(
        "retry-count-not-raised",
        "a message that always fails goes round for ever",
        "policy/decide.py",
        "    return new(Delay, (journey.retried(retries + 1), event,",
        "    return new(Delay, (journey.retried(retries), event,",
        "unit/test_decide.py",
    ),
    _one(
        "one-retry-too-many",
        "max_retries is a retry out",
        "policy/decide.py",
        "    if retries >= max_retries:\n",
        "    if retries > max_retries:\n",
        "unit/test_decide.py",
    ),
    _one(
        "attempt-climbs-the-ladder",
        "a retry from the dead store climbs the ladder again",
        "policy/decide.py",
        "    if attempt is not None and found.same:\n",
        "    if False:\n",
        "unit/test_decide.py",
    ),
    _one(
        "claimed-origin-believed",
        "whoever may publish names the queue that a message is sent to",
        "policy/origin.py",
        "    if claim is not None and trust.allows(claim.origin):\n",
        "    if claim is not None:\n",
        "unit/test_origin.py",
    ),
    _one(
        "origin-check-dropped",
        "an origin is taken to be there without the broker being asked",
        "broker/origins.py",
        '            scratch.call_later("queue_declare", queue=origin.queue, passive=True)\n',
        "",
        "integration/test_origins.py::test_a_queue_that_is_not_there_is_gone_and_nothing_is_made_for_it",
    ),
    _one(
        "every-failed-check-is-gone",
        "an origin that only cannot be looked at counts as gone, and its messages are dead-lettered",
        "broker/origins.py",
        "            if not error.is_gone:\n                self._doubt(place, error.text)\n                return\n",
        "",
        "integration/test_origins.py::test_without_any_right_to_publish_the_origin_is_unclear_and_the_message_stays",
    ),
    _one(
        "report-off-by-one",
        "the counts of a report do not add up",
        "runs/report.py",
        "    return counts, reasons\n",
        '    return counts | {"got": got + 1}, reasons\n',
        "unit/test_report.py",
    ),
    _one(
        "share-beyond-the-bound",
        "queues together give more than a run may take",
        "runs/budget.py",
        "            more = min(part, depths[queue] - shares[queue], left)\n",
        "            more = min(part, depths[queue] - shares[queue])\n",
        "unit/test_budget.py",
    ),
    _one(
        "deaths-at-the-limit-move",
        "check moves what has failed exactly as often as it may",
        "runs/check.py",
        "        if counted.failures <= self._limit:\n",
        "        if counted.failures < self._limit:\n",
        "acceptance/test_exact_bounds.py::test_a_message_that_failed_just_as_often_as_it_may_stays",
    ),
    _one(
        "same-id-is-the-same-message",
        "another message with a known id counts as a copy, and is acknowledged without being stored",
        "policy/lifecycle.py",
        "    if known.digest != arrival.digest or arrival.is_elsewhere:\n",
        "    if False:\n",
        "unit/test_lifecycle.py",
    ),
    _one(
        "twins-are-taken-for-one",
        "of two equal messages without an id one counts as a copy, and is lost",
        "policy/lifecycle.py",
        "    if arrival.redelivered and twins == 1 and not in_doubt:\n",
        "    if twins:\n",
        "unit/test_lifecycle.py",
    ),
    _one(
        "attempt-not-written-down",
        "a retry is published without its attempt committed before: nobody knows its return",
        "deadstore/attempts.py",
        "    begun = _add(connection, {row_id: strategies[row_id] for row_id in ids}, worker, at)\n",
        "    begun = dict.fromkeys(ids, 1)\n",
        "integration/test_claim.py::test_an_attempt_is_there_unsent_before_its_publish_and_marked_after",
    ),
    _one(
        "lease-ignored",
        "a worker takes over what another is sending: it goes out twice",
        "deadstore/claim.py",
        ".where(text(HAS_LEASE), is_over)",
        ".where(text(HAS_LEASE))",
        "integration/test_claim.py::test_a_lease_that_ran_out_is_taken_over_under_the_same_number",
    ),
    _one(
        "let-go-too-early",
        "what a plan has sent and what came back is retried before the plan is over",
        "deadstore/states.py",
        '            values["plan_id"] = STILL_RESERVED\n',
        '            values["plan_id"] = None\n',
        "integration/test_plans.py::test_what_comes_to_rest_before_its_plan_is_over_stays_reserved_until_then",
    ),
    _one(
        "late-acks-forgotten",
        "acknowledgements that come late to a quorum queue are lost with its channel: those messages go twice",
        "broker/fetch.py",
        "late <= _APPLIED_AT_ONCE:",
        "late >= 0:",
        "integration/test_fetch.py::test_what_is_settled_late_is_gone_all_the_same",
    ),
    _one(
        "token-ignored",
        "a worker that was too slow begins an attempt of a row that is another's by now",
        "deadstore/attempts.py",
        " if token == tokens[row_id]]",
        "]",
        "integration/test_claim.py::test_only_the_holder_of_the_token_begins_an_attempt",
    ),
    _one(
        "sent-is-sent-again",
        "an attempt that the broker has confirmed is taken over and goes out again",
        "deadstore/claim.py",
        "        connection.execute(update(MESSAGES).where(mine, ~IS_SENT).values(lock))\n",
        "        connection.execute(update(MESSAGES).where(mine).values(lock))\n",
        "integration/test_take_over.py",
    ),
    _one(
        "resolved-before-anybody-looked",
        "a retry counts as a success although nobody has looked where it would come back",
        "policy/lifecycle.py",
        "    if watched is None or now < over or watched <= over:\n",
        "    if now < over:\n",
        "unit/test_lifecycle.py",
    ),
    _one(
        "failed-attempts-without-end",
        "a message that always fails is retried for ever",
        "policy/lifecycle.py",
        "    if failed >= max_attempts:\n",
        "    if failed > max_attempts:\n",
        "unit/test_lifecycle.py",
    ),
    _one(
        "cold-copy-not-verified",
        "what was written to cold storage is not read back: a bad disk loses the message",
        "runs/archive.py",
        "    if seals(storage, part) != packing.seals:\n",
        "    if False:\n",
        "integration/test_retention.py::test_a_disk_that_keeps_something_else_than_it_was_given_archives_nothing",
    ),
    _one(
        "deleted-although-changed",
        "a row is deleted although it changed after its copy was made",
        "runs/retain.py",
        ' if seal(line) == kept.get(line.message["id"])}\n',
        "}\n",
        "integration/test_retention.py::test_a_note_that_came_after_the_copy_makes_another_one",
    ),
    _one(
        "plan-takes-what-changed",
        "a replay sends a message that somebody has changed since the plan was looked at",
        "deadstore/plan_rows.py",
        "    elif row.updated_at != item.seen_updated_at:\n",
        "    elif False:\n",
        "integration/test_plans.py::test_what_changed_since_the_plan_is_skipped_with_its_reason",
        "integration/test_plans.py::test_what_changes_after_it_was_reserved_is_skipped_too",
    ),
    _one(
        "reserved-row-deleted",
        "retain takes a message that a replay plan has reserved",
        "deadstore/retention.py",
        "== known[row.id][1:4] and row.plan_id is None",
        "== known[row.id][1:4]",
        "integration/test_reserved_meanwhile.py",
    ),
    _one(
        "alert-fires-each-time",
        "an alert that stands is told again by every run",
        "policy/alerts.py",
        " if (alert.name, alert.subject) not in active)\n",
        ")\n",
        "unit/test_alerts.py",
    ),
    _one(
        "password-in-the-log",
        "the password of an address stands in the log",
        "logs.py",
        'return f"://{user}:***@{place}"',
        'return f"://{secret}@{place}"',
        "unit/test_logs.py",
    ),
    _one(
        "watchdog-sleeps",
        "a run that hangs is never ended",
        "cli/watchdog.py",
        "            os._exit(_HUNG)\n",
        "            return\n",
        "faults/test_silent_database.py::test_what_ignores_every_bound_is_ended_with_its_process",
    ),
)
