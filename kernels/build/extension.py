"""From the sources of a problem to its operators: what to build here, under which name, once."""

import contextlib
import hashlib
import importlib.machinery
import json
import logging
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kernels.build import cache, toolchain
from kernels.build.toolchain import LOGGER, BuildError

PATIENCE_S = 300.0  # a builder that may have been stopped is waited for no longer


def load(problem: str, sources: dict[str, str], load_inline: Callable[..., object]) -> None:
    """Loads the operators of a problem; builds them first where there is no finished build.

    Args:
        sources: the texts by file name.
        load_inline: `torch.utils.cpp_extension`'s, called with its arguments by name for a build.

    Raises:
        BuildError: there is no build to load, and none can be made.
    """
    targets = toolchain.cuda_targets()
    flags = toolchain.cpu_flags() + ["-DKERNELS_WITH_CUDA"] * bool(targets)
    variables = ("CXX", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
    identity = [sources, flags, toolchain.CUDA_FLAGS, torch.__version__, torch.version.git_version]
    identity += [importlib.machinery.EXTENSION_SUFFIXES[0], *map(os.environ.get, variables)]
    # A manifest lists the GPUs that a build is for; all else that the code depends on is here.
    name = f"kernels_{problem}_{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]}"
    if any(Path(library).stem == name for library in torch.ops.loaded_libraries):
        return
    folder = cache.choose_folder(name)

    def is_loaded() -> bool:
        for library, built in cache.finished_builds(folder, name):
            if all(toolchain.serving(target) & {*built} for target in targets):
                with contextlib.suppress(OSError):  # as one that was linked to a newer glibc
                    torch.ops.load_library(str(library))
                    return True
        return False

    with contextlib.ExitStack() as stack:
        stack.push(lambda _, error, __: explain(error, folder))
        if is_loaded():
            return
        for place in (*reversed(folder.parents), folder):
            place.mkdir(mode=0o755, exist_ok=True)
        end, is_next = time.monotonic() + PATIENCE_S, cache.take_turn(folder, stack)
        if not is_next:
            LOGGER.warning("waiting for another process, which builds the kernels in %s", folder)
        while not is_next and time.monotonic() < end:
            time.sleep(0.05)
            is_next = is_loaded() or cache.take_turn(folder, stack)
        if not is_loaded():
            private = folder / f"build-{cache.process()}-{time.monotonic_ns()}"
            private.mkdir(mode=0o755)
            is_published = (private / "manifest.json").exists
            stack.callback(lambda: is_published() or shutil.rmtree(private, ignore_errors=True))
            build(private, name, sources, flags, targets, load_inline)
            cache.publish(private / f"{name}.so", targets)


def build(
    folder: Path, name: str, sources: dict, flags: list, targets: list, load_inline: Callable
) -> None:
    """Builds the extension in `folder` and loads it."""
    toolchain.check_compiler()
    texts = {".cpp": "", ".cu": ""}
    for file, text in sources.items():  # the compiler's errors then have their real names
        (folder / "kernels" / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / "kernels" / file).write_text(text, encoding="utf-8")
        if Path(file).suffix in texts:
            texts[Path(file).suffix] += f'#include "{file}"\n'
    logger, quiet = logging.getLogger("torch.utils.cpp_extension"), logging.Filter("nobody")
    with contextlib.ExitStack() as stack:
        stack.callback(logger.removeFilter, quiet)
        logger.addFilter(quiet)  # torch warns that there is no GPU, and of clang
        # A second build of this process would get another name.
        toolchain.torch_tools().JIT_EXTENSION_VERSIONER.entries.pop(name, None)
        load_inline(
            name=name,
            cpp_sources=texts[".cpp"],
            cuda_sources=texts[".cu"] if targets else None,
            extra_cflags=[*flags, "-Ikernels"],
            extra_cuda_cflags=["-Ikernels", *toolchain.cuda_flags(targets, folder)],
            extra_ldflags=["-fopenmp", "-L."],
            build_directory=str(folder),
            no_implicit_headers=True,
            is_python_module=False,
        )


def explain(error: BaseException | None, folder: Path) -> None:
    """Raises what ends a build as a BuildError that begins with the first real error."""
    if isinstance(error, subprocess.CalledProcessError):  # asked for its version
        reason = f"{os.environ.get('CXX', 'c++')!r} does not work as a C++ compiler: {error}"
    elif isinstance(error, OSError) and error.errno is None:  # of the loader
        reason = f"the library that was just built does not load: {error.__cause__ or error}"
    elif isinstance(error, OSError):
        reason = f"can't build in {folder}: {error}. Set TORCH_EXTENSIONS_DIR to another folder"
    elif isinstance(error, RuntimeError) and not isinstance(error, BuildError):
        reason = f"{toolchain.first_error(str(error))}\n\nThe whole output:\n{error}"
    else:
        return
    raise BuildError(reason) from None
