"""Loads the extensions; builds those that no finished build is found for."""

import contextlib
import hashlib
import importlib.machinery
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels import STABLE_NAMESPACE
from kernels.build import cache, toolchain
from kernels.build.errors import explain, say
from kernels.build.toolchain import Toolchain

LoadInline = Callable[..., object]
QUIET_S = 2.0  # a build that takes longer is announced


@dataclass(frozen=True)
class Extension:
    """What is compiled for a problem.

    Attributes:
        problem: its name.
        sources: the texts of the files by their paths.
        cxx_flags: the C++ compiler's flags, as far as they decide what the library does.
        key: a digest of all that the library depends on, but for compilers and GPUs.
    """

    problem: str
    sources: Mapping[str, str]
    cxx_flags: list[str]
    key: str

    @property
    def name(self) -> str:
        """The library's name, without `.so`."""
        return f"kernels_{self.problem}_{self.key}"

    @property
    def namespace(self) -> str:
        """The namespace in `torch.ops` that has this build's operators, and no other build's."""
        return f"{STABLE_NAMESPACE}_{self.key}"


def load_extensions(
    sources: Mapping[str, Mapping[str, str]], load_inline: LoadInline
) -> dict[str, str]:
    """Load the operators of several problems; compile them first if that has not been done.

    Those that have to be compiled are compiled at the same time.

    Args:
        sources: for each problem, the texts of its files by their paths.
        load_inline: `torch.utils.cpp_extension.load_inline`, called by keyword for each build.

    Returns:
        For each problem the namespace of its operators, `torch.ops.<namespace>`.

    Raises:
        BuildError: an extension is not there and cannot be built; the message says why.
    """
    tools = toolchain.find_toolchain()
    extensions = [_describe(problem, texts, tools) for problem, texts in sources.items()]
    missing = [extension for extension in extensions if not _is_in_process(extension)]
    if missing:
        folder = cache.choose_folder()
        try:
            missing = [extension for extension in missing if not _load(extension, folder, tools)]
            if missing:
                _build_all(missing, folder, tools, load_inline)
        except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
            raise explain(error, folder) from None
    return {extension.problem: extension.namespace for extension in extensions}


def _describe(problem: str, sources: Mapping[str, str], tools: Toolchain) -> Extension:
    flags = toolchain.cpu_flags()
    if tools.targets:
        flags = [*flags, "-DKERNELS_WITH_CUDA"]
    identity = [
        dict(sources),
        flags,
        toolchain.CUDA_FLAGS,
        [os.environ.get(name) for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")],
        [torch.__version__, torch.version.git_version],
        importlib.machinery.EXTENSION_SUFFIXES[0],
    ]
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    return Extension(problem, sources, flags, key)


def _is_in_process(extension: Extension) -> bool:
    """Return whether this process has loaded the extension, from whichever folder."""
    return any(Path(library).stem == extension.name for library in torch.ops.loaded_libraries)


def _load(extension: Extension, folder: Path, tools: Toolchain) -> bool:
    """Load a finished build that fits this machine; return whether there was one."""
    for build in cache.finished_builds(folder, extension.name):
        if _fits(build, tools):
            # The library may need another glibc than this machine's, where hosts share the folder.
            with contextlib.suppress(OSError):
                torch.ops.load_library(str(build.library))
                return True
    return False


def _fits(build: cache.Build, tools: Toolchain) -> bool:
    """Return whether a build has code for all GPUs, by the compilers that would be used now.

    A compiler that is missing here, as in a container made for running alone, is no objection.
    """
    for target in tools.targets:
        if not toolchain.codes_for(target) & set(build.targets):
            return False
    for compiler, version in tools.compilers.items():
        if version and version != build.compilers.get(compiler):
            return False
    return True


def _build_all(
    extensions: list[Extension], folder: Path, tools: Toolchain, load_inline: LoadInline
) -> None:
    """Build several extensions, a thread each."""
    cache.check_executable(folder)
    toolchain.check_tools(tools)
    toolchain.warn_of_ignored_targets()

    def build_one(extension: Extension) -> None:
        with cache.turn_to_build(folder, extension.name):
            cache.remove_leftovers(folder)
            if not _load(extension, folder, tools):  # another process may have built it meanwhile
                _build(extension, folder, tools, load_inline)

    # torch changes these flags while it loads a library, and two threads would not restore them.
    dlopen_flags = sys.getdlopenflags()
    try:
        with (
            _announced(extensions, folder),
            _quiet_torch(),
            toolchain.build_environment(tools),
            ThreadPoolExecutor() as pool,
        ):
            list(pool.map(build_one, extensions))  # raises what a thread raised
    finally:
        sys.setdlopenflags(dlopen_flags)


def _build(extension: Extension, folder: Path, tools: Toolchain, load_inline: LoadInline) -> None:
    """Compile, load and publish an extension."""
    with cache.unfinished_folder(folder) as place:
        _compile(extension, place, tools, load_inline)
        library = place / f"{extension.name}.so"
        cache.publish(place, cache.Build(library, tools.targets, tools.compilers))


def _compile(extension: Extension, place: Path, tools: Toolchain, load_inline: LoadInline) -> None:
    """Compile and load an extension in a folder.

    The sources are written to files, which two texts include: so the compilers' errors have the
    real names and lines.
    """
    for path, text in extension.sources.items():
        file = place / "kernels" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    toolchain.link_cuda_runtime(tools, place)
    namespace = f"-DKERNELS_NAMESPACE={extension.namespace}"
    speed = toolchain.GCC_SPEED_FLAGS if tools.is_gcc else []
    # torch counts the extensions of a name, and would give a second one another name.
    toolchain.cpp_extension().JIT_EXTENSION_VERSIONER.entries.pop(extension.name, None)
    load_inline(
        name=extension.name,
        cpp_sources=_include_all(extension, ".cpp"),
        cuda_sources=_include_all(extension, ".cu") if tools.targets else None,
        extra_cflags=[*extension.cxx_flags, *speed, namespace, "-Ikernels"],
        extra_cuda_cflags=["-Ikernels", *toolchain.cuda_flags(tools.targets)],
        extra_ldflags=["-fopenmp", "-L."],
        build_directory=str(place),
        no_implicit_headers=True,
        is_python_module=False,
    )


def _include_all(extension: Extension, suffix: str) -> str:
    """Return a text that includes all sources with this suffix."""
    paths = [path for path in extension.sources if path.endswith(suffix)]
    return "".join(f'#include "{path}"\n' for path in paths)


@contextlib.contextmanager
def _announced(extensions: list[Extension], folder: Path) -> Iterator[None]:
    """Say what takes so long, after two seconds; and in the end how long it took."""
    problems = " and ".join(extension.problem for extension in extensions)
    start = time.monotonic()
    timer = threading.Timer(
        QUIET_S,
        say,
        [
            f"compiling {problems}. This happens once, and takes about a minute on two cores. The "
            f"result is kept in {folder}"
        ],
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    seconds = time.monotonic() - start
    if seconds > QUIET_S:
        say(f"compiled in {seconds:.0f} s")


@contextlib.contextmanager
def _quiet_torch() -> Iterator[None]:
    """Silence torch's warnings that there is no GPU, and that clang is no GCC."""
    logger = logging.getLogger("torch.utils.cpp_extension")
    nothing = logging.Filter("nothing has this name")
    logger.addFilter(nothing)
    try:
        yield
    finally:
        logger.removeFilter(nothing)
