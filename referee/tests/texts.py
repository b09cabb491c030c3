"""Makes the texts of references and solutions, and the rows of tables of files to grade.

A row is (text or path of the file, pattern of the verdict, pattern of what the line says). The line
of a file that is not correct says the reason.
"""

from pathlib import Path
from textwrap import indent

Row = tuple[str | Path, str, str]
Table = dict[str, Row]
# The reason if a result is computed too late; it depends on what is in memory before.
LATE = "has not written|returns zeros|elements|is not complete"
IMPORTS = "import torch\nfrom torch import nn\n\n\n"


def module(forward: str, init: str = "", arguments: str = "", name: str = "ModelNew") -> str:
    """The text of a module's class.

    Args:
        forward: the body of `forward`, not indented; `x` is the first input.
        init: the body of `__init__` after super().__init__(), not indented.
        arguments: of `__init__` after `self`: ", a, b" for example.
        name: of the class.
    """
    text, inner = f"class {name}(nn.Module):\n", " " * 8
    if init:
        text += f"    def __init__(self{arguments}):\n{inner}super().__init__()\n"
        text += f"{indent(init.strip(), inner)}\n"
    text += f"    def forward(self, *inputs):\n{inner}x = inputs[0]\n"
    return f"{text}{indent(forward.strip(), inner)}\n"


def reference(forward: str, inputs: str, init: str = "") -> str:
    """The text of a reference file.

    Args:
        forward: as in `module`.
        inputs: what `get_inputs` returns: "[torch.rand(8, 64)]" for example.
        init: as in `module`.
    """
    text = module(forward, init, name="Model") + f"\ndef get_inputs():\n    return {inputs}\n"
    return f"{text}\ndef get_init_inputs():\n    return []\n"


def correct(text: str | Path, line: str = "") -> Row:
    """A row of a file that is right; `line` is a pattern of its notes and its accuracy."""
    return text, "correct", line


def wrong(text: str | Path, reason: str) -> Row:
    """A row of a file that is wrong, with a pattern of the reason."""
    return text, "wrong", reason


def error(text: str | Path, reason: str) -> Row:
    """A row of a file that raises or ends, with a pattern of the reason."""
    return text, "error", reason
