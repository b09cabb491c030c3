"""The line of a long message that says what failed; names and texts that cannot be printed."""

import pytest

from referee.messages import first_error_line, printable
from referee.report import graded_files, tables

COMPILER = "Error building 'x': [1/2] c++ -c /a/main.cpp\nFAILED: main.o\n/a/b/"
ERROR = "main.cpp:3:5: error: expected ';' before '}' token"
NVCC = 'cuda.cu(12): error: identifier "foo" is undefined'
TEXTS = [
    ("one\ntwo", "one"),
    ("", ""),
    (f"Error building\n/a/{NVCC}\n", NVCC),
    (f"{COMPILER}{ERROR}\nninja: error: no", ERROR),
]


@pytest.mark.parametrize(("text", "line"), TEXTS)
def test_the_first_line_with_an_error_is_found(text, line):
    """If no line has a compiler's error, it is the first line."""
    assert first_error_line(text) == line


def test_a_text_stays_one_line_and_does_not_move_the_cursor():
    assert printable("a\nb\x1b[2K\udcff é") == r"a\nb\x1b[2K\udcff é"


def test_a_files_name_forges_no_verdict():
    record = {
        "file": "a\nb.py: correct",
        "verdict": "wrong",
        "reason": "",
        "accuracy": "",
        "runs": [],
    }
    assert graded_files.describe(record) == r"a\nb.py: correct: wrong"
    assert r"a\nb.py: correct  " in graded_files.ranking([record])


def test_what_a_file_prints_does_not_move_the_cursor():
    assert tables.indented("\x1b[1Ab.py: correct\r\n\tx\n") == (
        "    \\x1b[1Ab.py: correct\n            x"
    )
