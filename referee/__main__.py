"""Runs `python -m referee REFERENCE SOLUTION...`: see `command`."""

import importlib.util
import sys

from referee import console
from referee.contestants import server
from referee.program import fork_server

# The workers of `folders` import this file too, under another name: they run no command.
if __name__ == "__main__":
    console.end_on_interrupt()  # Ctrl-C may come during the next import, which is that of torch
    if importlib.util.find_spec("torch") is None:
        console.say("torch is not installed: pip install torch")
        sys.exit(2)
    # Another process will be needed, so it imports torch already: that from which workers are
    # forked, or that from which contestants are.
    if any(argument.startswith("--devices") for argument in sys.argv):
        fork_server.start()
    else:
        server.start_ahead()

# isort: split
from referee.program import command

if __name__ == "__main__":
    sys.exit(console.run(command.main))
