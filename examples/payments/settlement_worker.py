"""Settles payments: moves the money at the bank, then writes it into the ledger."""

import argparse
import itertools
import json
import os
import signal

from bank import Bank
from ledger import Ledger
from names import BROKER_URL, FOLDER, SETTLEMENTS

from dlqbatch.consumer import Consumer, Context

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--die-at", type=int, default=0, metavar="N", help="be killed in the middle of the Nth transfer")
die_at = parser.parse_args().die_at

consumer = Consumer(BROKER_URL, queue=SETTLEMENTS, max_retries=3)
ledger = Ledger(FOLDER)
bank = Bank(FOLDER)
transfers = itertools.count(1)


@consumer.on("settlement.requested")
def settle(body: bytes, context: Context) -> None:
    payment = json.loads(body)
    payment_id, cents = payment["payment_id"], payment["cents"]
    # Every message is delivered at least once, so all of this may happen again. What makes it count once is the
    # payment's id: it is the bank's idempotency key, and the ledger's primary key.
    reference = bank.transfer(payment_id, payment["account"], cents, tries_before=context.retries)
    if next(transfers) == die_at:
        # The worst moment: the money has moved, and nobody has written it down.
        os.kill(os.getpid(), signal.SIGKILL)
    ledger.settle(payment_id, cents, reference)


if __name__ == "__main__":
    consumer.run()
