"""`python -m referee REFERENCE SOLUTION...`: see `command`."""

import sys

from referee import console  # first: the imports that follow take seconds

if __name__ == "__main__":
    console.name_program("referee")
    console.end_on_interrupt()

# isort: split
from referee import command

if __name__ == "__main__":
    sys.exit(console.run(command.main))
