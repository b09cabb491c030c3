"""The line of a long message that says what failed."""

import pytest

from referee.messages import first_error_line

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
