"""Where things are: the same few names for the API, both workers and the script that starts them."""

import os
from pathlib import Path

BROKER_URL = os.environ["PAYMENTS_BROKER_URL"]
FOLDER = Path(os.environ["PAYMENTS_FOLDER"])  # the ledger's file and the bank's
PREFIX = os.environ.get("PAYMENTS_PREFIX", "")  # so that two of these examples on one broker do not meet

# Each is an exchange and its queue. `dlqbatch topology apply` makes them, and both once more for the dead letters, with
# `dlq.` before the name.
TRANSACTIONS = f"{PREFIX}transaction.created"
SETTLEMENTS = f"{PREFIX}settlement.requested"
