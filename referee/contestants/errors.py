"""Exceptions of requests: how a contestant can fail to answer."""


class EndedError(Exception):
    """A contestant's process has ended, or the server has.

    The arguments are its exit status, negative for a signal, and the end of what it printed.
    """


class UnstoppableError(EndedError):
    """The process was killed because something in its tree did not stop."""


class WokenError(EndedError):
    """The process was killed because something in its tree ran between two requests.

    It had stopped. A timer can send SIGCONT to a stopped process, for example.
    """


class ForgedError(Exception):
    """The reply cannot be the request handler's: the solution has sent or changed it.

    The argument says what is wrong with the reply: "it is no JSON" for example.
    """


class TimeLimitError(Exception):
    """The deadline has passed."""


class RaisedError(Exception):
    """The solution has raised an exception; the argument is the "raised" of the reply."""

    @property
    def is_lack_of_memory(self) -> bool:
        """True if its type has the name of torch's exception for a GPU without memory left."""
        return self.args[0].get("type") == "OutOfMemoryError"
