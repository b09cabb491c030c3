"""New processes for tests: Python programs, copies of the project, and host code compiled alone."""

import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernels"
# The server that forks the processes of `forked`. It imports these once.
FORKSERVER = multiprocessing.get_context("forkserver")
PRELOADED = ["torch", "pytest"]


def copy_project(folder):
    """Copy the files that `run.py` needs to another folder."""
    for name in ("kernels", "problems", "referee"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("model.py", "model_new.py", "run.py"):
        shutil.copy(ROOT / name, folder)


def copy_finished_builds(folder):
    """Copy the project's finished builds to another folder of builds, where imports find them.

    This does nothing if TORCH_EXTENSIONS_DIR is not set.
    """
    if "TORCH_EXTENSIONS_DIR" not in os.environ:
        return
    builds = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    for build in builds.glob("kernels-*/kernels_*-0"):
        shutil.copytree(build, folder / build.relative_to(builds))


def python(code, folder, path=(ROOT,), **environment):
    """Run Python code in a new process, and return the completed process with its output.

    Args:
        code: the text of the program; its indentation is removed.
        folder: the folder in which the process starts.
        path: the folders from which it imports.
        **environment: environment variables to set, or to unset if the value is None.
    """
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), **environment}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=folder,
        env={name: value for name, value in variables.items() if value is not None},
        capture_output=True,
        text=True,
        check=False,
    )


def forked(code, folder, path=(ROOT,), **environment):
    """Run code as `python` does, in a fork of a process that has imported torch.

    This saves the two seconds that `import torch` takes. A fork is no replacement for a new process
    if the environment has to be set before torch is loaded, as LD_PRELOAD has.
    """
    variables = {**os.environ, **environment}
    variables = {name: value for name, value in variables.items() if value is not None}
    FORKSERVER.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as output:
        arguments = (textwrap.dedent(code), folder, path, variables, Path(output))
        process = FORKSERVER.Process(target=execute, args=arguments)
        process.start()
        process.join()
        out, errors = (Path(output, name).read_text() for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess("fork", process.exitcode, out, errors)


def execute(code, folder, path, variables, output):
    """Execute code in a process of `forked`; its output goes to two files."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(output / name, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    others = [entry for entry in sys.path if Path(entry).resolve() != ROOT]
    sys.path[:] = ["", *map(str, path), *others]
    exec(code, {"__name__": "__main__"})


def printed(code, folder, run=python, **options):
    """Run code by `python` or `forked`, assert that it succeeds, and return its output."""
    done = run(code, folder, **options)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr}"
    return done.stdout


def compiled(folder, source_text, compiler="c++", *flags):
    """Compile a program that includes headers of `kernels/`, and return a function that runs it.

    The function takes the program's arguments, which are integers, and the text of its standard
    input. It returns the words that the program prints.

    Args:
        folder: where the source and the program are written.
        source_text: the program's source.
        compiler: a C++ compiler or nvcc; without it the test is skipped.
        *flags: more flags of the compiler.
    """
    if shutil.which(compiler) is None:
        pytest.skip(f"needs {compiler}")
    source = folder / ("main.cu" if compiler == "nvcc" else "main.cpp")
    program = folder / "main"
    source.write_text(source_text)
    compile_it = [compiler, "-std=c++17", f"-I{KERNELS}", *flags, source, "-o", program]
    subprocess.run(compile_it, check=True)

    def words_of_run(*arguments, text=None):
        command = [program, *(str(int(argument)) for argument in arguments)]
        return subprocess.check_output(command, input=text, text=True).split()

    return words_of_run
