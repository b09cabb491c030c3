"""Kind 15: a process without a parent is never at rest."""

import os

from common import Plain as ModelNew

__all__ = ["ModelNew"]
if os.fork() == 0:
    if os.fork() == 0:
        while True:
            pass
    os._exit(0)
