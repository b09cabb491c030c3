"""Texts of files that are graded, and rows of tables: text, verdict, what the line says."""

from pathlib import Path
from textwrap import indent

Row = tuple[str | Path, str, str]
Table = dict[str, Row]
IMPORTS = "import torch\nfrom torch import nn\n\n\n"


def module(forward: str, init: str = "", arguments: str = "", name: str = "ModelNew") -> str:
    """The text of a module's class; both bodies are lines without indentation."""
    text, inner = f"class {name}(nn.Module):\n", " " * 8
    if init:
        text += f"    def __init__(self{arguments}):\n{inner}super().__init__()\n"
        text += f"{indent(init.strip(), inner)}\n"
    text += f"    def forward(self, *inputs):\n{inner}x = inputs[0]\n"
    return f"{text}{indent(forward.strip(), inner)}\n"


def reference(forward: str, inputs: str, init: str = "") -> str:
    """The text of a reference file."""
    text = module(forward, init, name="Model") + f"\ndef get_inputs():\n    return {inputs}\n"
    return f"{text}\ndef get_init_inputs():\n    return []\n"


def correct(text: str | Path, words: str = "") -> Row:
    """A row of a file that is right."""
    return text, "correct", words


def wrong(text: str | Path, words: str = "") -> Row:
    """A row of a file that is wrong."""
    return text, "wrong", words


def error(text: str | Path, words: str = "") -> Row:
    """A row of a file that raises or ends."""
    return text, "error", words
