"""pika's connection with a frame loop of our own for the busy channels; this module alone knows pika's insides.

pika decodes every frame into objects, slices its whole buffer for each, reads 4 KiB at a time and sends each frame
with a system call of its own. A drain has many frames of few kinds: their channel gets them as offsets into the bytes
that were read, and all answers to a read leave in a single write.
"""

from __future__ import annotations

from collections.abc import Callable
from socket import socket
from ssl import SSLSocket
from struct import Struct
from typing import Any, Final

from pika.adapters.select_connection import SelectConnection
from pika.exceptions import StreamLostError
from pika.frame import decode_frame

from dlqbatch.errors import BrokerLost

_FRAME_HEADER: Final = Struct(">BHI").unpack_from
_HEADER_SIZE: Final = 7
_FRAME_END: Final = 0xCE
_LONGEST_FRAME: Final = 16 * 1024 * 1024
"""Far above the agreed size, because a broker adds to headers. A longer frame is no AMQP, and would fill the memory."""
NOT_AMQP: Final = "it sent what is not AMQP"
_READ_SIZE: Final = 256 * 1024
_JOIN_LIMIT: Final = 32 * 1024
"""Pieces up to this size are joined before they are written; larger ones would only be copied."""
_STOP_READING: Final = 8 * 1024 * 1024
_READ_ON: Final = 2 * 1024 * 1024
"""Unsent bytes at which reading pauses and goes on, so that a slow broker does not fill our memory."""


class Wire(SelectConnection):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.readers: dict[int, Callable[[int, bytes, int, int], int]] = {}
        """The reader of each channel. Called with frame type, buffer, start and end of the payload, it returns where it
        stopped reading, which may be behind its next frames; 0 leaves the frame to pika."""
        self.after_read: Callable[[], None] | None = None
        """Called after all frames of a read were handled."""
        self.failure: BaseException | None = None
        self._unread: list[bytes] = []
        self._unread_size = 0
        self._wanted = 0
        self._outbox: list[bytes] = []
        self._reading = True
        self._unsent = 0
        self._socket: socket | None = None
        """What may be written to without pika; over TLS nothing may."""
        super().__init__(*arguments, **options)

    def abort(self) -> None:
        """Drop the socket without closing the connection; it takes a turn of the loop or two."""
        if not self.is_closed:
            self._terminate_stream(StreamLostError("given up"))

    def put(self, frames: bytes) -> None:
        """Add whole encoded frames of one channel to what the next `flush` sends."""
        self._outbox.append(frames)

    def forget(self, channel: int) -> None:
        """Drop the reader of a closed channel, and what waits to be sent on it.

        The broker's close is answered at once; a frame behind that answer would cost the whole connection.
        """
        self.readers.pop(channel, None)
        number = channel.to_bytes(2, "big")
        self._outbox = [frames for frames in self._outbox if frames[1:3] != number]

    def flush(self) -> None:
        outbox = self._outbox
        if not outbox:
            return
        self._outbox = []
        if self.is_closed:
            return
        if max(map(len, outbox)) <= _JOIN_LIMIT:
            self._emit(outbox)
        else:
            self._emit_large(outbox)
        if self._reading and self._get_write_buffer_size() > _STOP_READING:
            self._pause_reading()

    def _emit_large(self, outbox: list[bytes]) -> None:
        small: list[bytes] = []
        for piece in outbox:
            if len(piece) <= _JOIN_LIMIT:
                small.append(piece)
                continue
            self._emit(small)
            self._emit([piece])
            small = []
        self._emit(small)

    def _emit(self, pieces: list[bytes]) -> None:
        if pieces:
            data = b"".join(pieces) if len(pieces) > 1 else pieces[0]
            self.bytes_sent += len(data)
            rest = self._send_at_once(data)
            if rest:
                self._adapter_emit_data(rest)

    def _send_at_once(self, data: bytes) -> bytes:
        """What the socket did not take.

        pika waits for the loop to say that it can be written to, as it nearly always can: three system calls more, and
        a turn of the loop in which the broker has nothing to do.
        """
        if self._socket is None or self._get_write_buffer_size():
            return data
        try:
            sent = self._socket.send(data)
        except OSError:
            # Full or broken: pika finds out which, and does what is to be done.
            return data
        return data[sent:]

    def _proto_connection_made(self, transport: Any) -> None:
        if not isinstance(transport._sock, SSLSocket):  # noqa: SLF001  (pika shows it nowhere)
            self._socket = transport._sock  # noqa: SLF001  (pika has no public way)
        transport._MAX_RECV_BYTES = _READ_SIZE  # noqa: SLF001  (pika offers no way to set it)
        # A single read for each turn of the loop. While a database works after each read, the next confirms arrive, and
        # pika would read on and on: no signal and no bound on time would be seen.
        transport._MAX_CONSUME_BYTES = 1  # noqa: SLF001  (pika has no public way)
        super()._proto_connection_made(transport)

    def _on_data_available(self, data_in: bytes) -> None:
        self._unread.append(data_in)
        self._unread_size += len(data_in)
        if self._unread_size < self._wanted:
            return
        try:
            self._read(data_in if len(self._unread) == 1 else b"".join(self._unread))
            if self.after_read is not None:
                self.after_read()
            if self._outbox and not self.is_closed:
                self.flush()
        except Exception as error:
            # The transport would only log it and drop the connection.
            self.failure = error
            raise

    def _read(self, buffer: bytes) -> None:
        position, size, wanted = 0, len(buffer), _HEADER_SIZE
        readers = self.readers
        while size - position > _HEADER_SIZE:
            kind, channel, length = _FRAME_HEADER(buffer, position)
            start = position + _HEADER_SIZE
            end = start + length
            if end >= size and buffer[position : position + 4] != b"AMQP":
                if length > _LONGEST_FRAME:
                    raise BrokerLost(f"{NOT_AMQP}: a frame of {length:,} bytes")
                wanted = _HEADER_SIZE + length + 1
                break
            handler = readers.get(channel)
            after = handler(kind, buffer, start, end) if handler is not None and buffer[end] == _FRAME_END else 0
            if not after:
                try:
                    count, frame = decode_frame(buffer[position : end + 1] if kind != b"A"[0] else buffer[position:])
                except Exception as error:
                    raise BrokerLost(f"{NOT_AMQP}: {type(error).__name__}") from error
                after = position + count
                if frame is not None:
                    self._process_frame(frame)
            position = after
        # Once for a whole read: only the check for heartbeats asks, between two reads.
        self.bytes_received += position
        rest = buffer[position:]
        self._unread = [rest] if rest else []
        self._unread_size = len(rest)
        self._wanted = wanted

    def _pause_reading(self) -> None:
        self._reading = False
        self._unsent = self._get_write_buffer_size()
        transport: Any = self._transport
        transport._nbio.remove_reader(transport._sock.fileno())  # noqa: SLF001  (pika has no method to stop reading)
        self._adapter_call_later(0.005, self._read_on)

    def _read_on(self) -> None:
        transport: Any = self._transport
        if transport is None:
            return
        unsent = self._get_write_buffer_size()
        if unsent > _READ_ON:
            if unsent < self._unsent:
                # Slow, but alive; the heartbeat check would only count what is read.
                self.bytes_received += 1
            self._unsent = unsent
            self._adapter_call_later(0.005, self._read_on)
            return
        self._reading = True
        transport._nbio.set_reader(transport._sock.fileno(), transport._on_socket_readable)  # noqa: SLF001  (pika has no public way)
