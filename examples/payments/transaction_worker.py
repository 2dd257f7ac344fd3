"""Takes what the API published, writes it into the ledger and asks for its settlement."""

import json

from ledger import Ledger
from names import BROKER_URL, FOLDER, SETTLEMENTS, TRANSACTIONS
from publisher import Publisher

from dlqbatch.consumer import Consumer, Context

# An exception that a handler raises means: try again, in the end give up. So nothing is caught here.
consumer = Consumer(BROKER_URL, queue=TRANSACTIONS, max_retries=3)
ledger = Ledger(FOLDER)
publisher = Publisher(BROKER_URL)


@consumer.on("transaction.created")
def record(body: bytes, _: Context) -> None:
    payment = json.loads(body)
    if ledger.record(payment["payment_id"], payment["currency"], payment["cents"]):
        publisher.publish(SETTLEMENTS, "settlement.requested", payment)
        # A crash right here asks for the settlement twice. The other order could forget to ask at all.
        ledger.forwarded(payment["payment_id"])


if __name__ == "__main__":
    consumer.run()
