"""The two roles of a contestant. What a contestant may do depends only on its role."""

from enum import Enum


class Role(str, Enum):  # Python 3.10 has no StrEnum
    """The role of a contestant's process; the value is its spelling in a request to fork.

    A solution has limits on its memory and files, shows its memory to the referee, and must stay
    stopped between requests. Eager, which the referee trusts, has no limits, and hides its memory.
    """

    SOLUTION = "solution"
    EAGER = "eager"
