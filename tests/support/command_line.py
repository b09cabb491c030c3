"""`run.py` as a process of its own: to its end, or interrupted."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from time import sleep

from tests.support.processes import ROOT


def command(*arguments: str, folder=ROOT) -> list[str]:
    """Return the command that runs the `run.py` of a folder."""
    return [sys.executable, str(folder / "run.py"), *arguments]


def run_to_end(
    *arguments: str, before=(), folder=ROOT, cwd=None, out=subprocess.PIPE, **environment
):
    """Run `run.py` to its end, and return the process with its output.

    Args:
        *arguments: the options of `run.py`.
        before: the words of the command before Python.
        folder: where `run.py` is.
        cwd: the folder in which it starts.
        out: its stdout.
        **environment: environment variables to set, or to unset if the value is None.
    """
    variables = {**os.environ, **environment}
    return subprocess.run(
        [*before, *command(*arguments, folder=folder)],
        env={name: value for name, value in variables.items() if value is not None},
        cwd=cwd,
        stdout=out,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )


def messages(stderr: str) -> list[str]:
    """Return the messages of run.py besides its progress; assert that there is no traceback."""
    assert "Traceback" not in stderr and "Exception ignored" not in stderr
    prefix = "run.py: "
    lines = [line for line in stderr.splitlines() if line.startswith(prefix)]
    return [line.removeprefix(prefix) for line in lines]


def start(*arguments: str, flags=(), sigint=signal.SIG_DFL, **environment: str):
    """Start `run.py` in a session of its own, and return the process.

    Args:
        *arguments: the options of `run.py`.
        flags: the options of Python.
        sigint: how SIGINT is handled when the program starts; nohup and `&` in a script ignore it.
        **environment: environment variables to set.
    """
    program, *rest = command(*arguments)
    return subprocess.Popen(
        [program, *flags, *rest],
        env={**os.environ, **environment},
        preexec_fn=lambda: signal.signal(signal.SIGINT, sigint),  # noqa: PLW1509, no other thread
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def interrupt_after(mark: str, *arguments: str, wait: float = 0.0, **options) -> str:
    """Interrupt `run.py` after a line with this mark; return all that it prints.

    Args:
        mark: a part of the line.
        *arguments: the options of `run.py`.
        wait: how many seconds after the line the interrupt comes.
        **options: those of `start`.
    """
    process = start(*arguments, **options)
    lines = []
    try:
        while not lines or mark not in lines[-1]:
            lines.append(process.stdout.readline())
            assert lines[-1], lines
        sleep(wait)
        process.send_signal(signal.SIGINT)
        lines += process.communicate(timeout=60)[0]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it has started, a compiler for example
    text = "".join(lines)
    assert (process.returncode, messages(text)) == (130, ["interrupted"])
    return text
