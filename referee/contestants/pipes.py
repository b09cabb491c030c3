"""The three pipes between the referee and a contestant: requests, replies, and what it prints."""

import os
import selectors
from time import monotonic

from referee.contestants.errors import ForgedError, TimeLimitError

MAX_REPLY_BYTES = 1 << 25  # descriptions of more than 100,000 results
KEPT_OUTPUT_BYTES = 1 << 16  # of what the process prints, the end is kept
MAX_READ_BYTES = 1 << 16  # of one read from a pipe


class Pipes:
    """The referee's ends of the pipes to one contestant.

    Every deadline is a time by `time.monotonic`, or inf.

    Args:
        requests: the descriptor to which requests are written, without blocking.
        replies: the descriptor from which replies are read.
        output: the descriptor from which the process's output is read.
    """

    def __init__(self, requests: int, replies: int, output: int) -> None:
        self._requests = requests
        self._replies = replies
        self._output = output
        self._unparsed = b""  # read from the pipe of replies, but not yet returned as a line
        self._printed = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(replies, selectors.EVENT_READ)
        self._selector.register(output, selectors.EVENT_READ)

    @property
    def has_unread_replies(self) -> bool:
        """True if more has come than the lines that `read_line` has returned."""
        return bool(self._unparsed)

    def printed(self) -> str:
        """Return the end of what the process has printed."""
        return self._printed.decode(errors="replace")

    def write(self, data: bytes) -> bytes:
        """Write as much of a request as the pipe can hold; return the rest."""
        while data:
            try:
                data = data[os.write(self._requests, data) :]
            except BlockingIOError:  # the pipe is full
                return data
            except BrokenPipeError:  # the process has ended; `read_line` will find no reply
                return b""
        return data

    def write_all(self, data: bytes, deadline: float) -> None:
        """Write the rest of a long request while the process reads it.

        Raises:
            TimeLimitError: the deadline has passed.
        """
        while data:
            if monotonic() > deadline:
                raise TimeLimitError
            rest = self.write(data)
            if rest == data:
                # The pipe is full. The process may wait until its own output is read.
                self.read(deadline, max_seconds=0.001)
            data = rest

    def read_line(self, deadline: float) -> bytes | None:
        """Wait for a line of the pipe of replies; return it, or None if the pipe has ended.

        Raises:
            ForgedError: the line is too long.
            TimeLimitError: the deadline has passed.
        """
        while b"\n" not in self._unparsed:
            if self._replies not in self._selector.get_map():  # the pipe has ended
                return None
            self.read(deadline, max_seconds=3600.0)  # a selector accepts no inf
            if len(self._unparsed) > MAX_REPLY_BYTES:
                raise ForgedError(f"it is longer than {MAX_REPLY_BYTES:,} bytes")
        line, _, self._unparsed = self._unparsed.partition(b"\n")
        return line

    def read(self, deadline: float, max_seconds: float) -> None:
        """Read the replies and the output that have come; wait up to `max_seconds` for some.

        Raises:
            TimeLimitError: the deadline has passed.
        """
        seconds_left = deadline - monotonic()
        if seconds_left <= 0:
            raise TimeLimitError
        for key, _ in self._selector.select(min(seconds_left, max_seconds)):
            data = os.read(key.fd, MAX_READ_BYTES)
            if not data:
                self._selector.unregister(key.fd)
            elif key.fd == self._output:
                self._printed = (self._printed + data)[-KEPT_OUTPUT_BYTES:]
            else:
                self._unparsed += data

    def close(self) -> None:
        """Close the referee's ends."""
        self._selector.close()
        for descriptor in (self._requests, self._replies, self._output):
            os.close(descriptor)


def open_pipes() -> tuple[Pipes, tuple[int, int, int]]:
    """Open three pipes; return the referee's ends, and the contestant's.

    The contestant's ends are three descriptors: it reads requests, writes replies, and prints.
    """
    contestants_requests, requests = os.pipe()
    replies, contestants_replies = os.pipe()
    output, contestants_output = os.pipe()
    os.set_blocking(requests, False)
    contestants_ends = contestants_requests, contestants_replies, contestants_output
    return Pipes(requests, replies, output), contestants_ends
