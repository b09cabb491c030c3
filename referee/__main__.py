"""Runs `python -m referee REFERENCE SOLUTION...`: see `command`."""

import sys

from referee import console

if __name__ == "__main__":
    console.name_program("referee")
    console.end_on_interrupt()  # Ctrl-C may come while torch is imported, below

# isort: split
from referee import command

if __name__ == "__main__":
    sys.exit(console.run(command.main))
