"""Ends a program with a sentence, not with a traceback, if torch is not installed.

This module imports nothing heavy, so that a program can ask it before all other imports.
"""

import importlib.util
import sys

from referee import console

HOW_TO_INSTALL = (
    "torch is not installed: pip install -r requirements.txt installs torch>=2.9 and ninja; "
    "README.md, Start, has the other steps"
)


def end_without_torch(program: str) -> None:
    """End the process with one line on stderr and status 2 if torch is not installed.

    Args:
        program: the name with which the line begins.
    """
    if importlib.util.find_spec("torch") is None:
        console.say(HOW_TO_INSTALL, program)
        sys.exit(2)
