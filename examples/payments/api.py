"""The API: `POST /payments` with a JSON object is answered with 202 as soon as the broker has the transaction."""

import json
import signal
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from names import BROKER_URL, TRANSACTIONS
from publisher import Publisher

LARGEST = 10_000
publisher = Publisher(BROKER_URL)


class Api(HTTPServer):
    def service_actions(self) -> None:  # called twice a second
        publisher.keep_alive()


class Requests(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        if self.path != "/payments":
            return self.answer(404, "POST /payments is all there is")
        size = int(self.headers.get("Content-Length", 0))
        payment = valid(self.rfile.read(size)) if size <= LARGEST else None
        if payment is None:
            return self.answer(400, "payment_id, account and currency (text) and cents (a whole number) are needed")
        # Not stored here, only published: were it done in two places, a crash between them would leave one without
        # the other. If this fails the client gets a 500 and asks again, with the same payment_id.
        publisher.publish(TRANSACTIONS, "transaction.created", payment)
        return self.answer(202, "accepted")

    def answer(self, code: int, text: str) -> None:
        body = json.dumps({"status": text}).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Not a line for every request."""


def valid(body: bytes) -> dict[str, Any] | None:
    try:
        told = json.loads(body)
        payment = {name: told[name] for name in ("payment_id", "account", "currency", "cents")}
    except (ValueError, TypeError, KeyError):
        return None
    texts = (payment["payment_id"], payment["account"], payment["currency"])
    is_right = all(isinstance(text, str) and text for text in texts) and type(payment["cents"]) is int
    return payment if is_right else None


if __name__ == "__main__":
    with Api(("127.0.0.1", 0), Requests) as server:
        # shutdown() waits for the loop below, so it has to be called from elsewhere.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: threading.Thread(target=server.shutdown).start())
        print(f"http://127.0.0.1:{server.server_port}", flush=True)
        server.serve_forever()
