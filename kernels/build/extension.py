"""Loads the problems' extensions, and builds those that are not in the cache.

An extension is a problem's sources with the flags to compile them. A build is the library that
certain compilers made of it for certain GPUs.
"""

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
QUIET_S = 2.0  # seconds; if a build takes longer, the user is told what takes so long


@dataclass(frozen=True)
class Extension:
    """The sources of a problem and their flags, with a key that is made from them.

    Attributes:
        problem: the problem's name.
        sources: the text of each source file, by its path in the package `kernels`.
        cxx_flags: the flags of the C++ compiler that are part of the key.
        key: a digest of the sources, of flags, and of the versions of torch and Python. Compilers
            and GPUs are not in it: each build's manifest names them, and `_fits` compares them.
    """

    problem: str
    sources: Mapping[str, str]
    cxx_flags: list[str]
    key: str

    @property
    def name(self) -> str:
        """The library's file name, without `.so`."""
        return f"kernels_{self.problem}_{self.key}"

    @property
    def namespace(self) -> str:
        """The namespace in `torch.ops` that has the operators of this extension alone."""
        return f"{STABLE_NAMESPACE}_{self.key}"


def load_extensions(
    sources: Mapping[str, Mapping[str, str]], load_inline: LoadInline
) -> dict[str, str]:
    """Load the operators of several problems, from the cache if possible.

    Extensions that are not in the cache are compiled, all at the same time. With MAX_JOBS=1, they
    are compiled one after the other.

    Args:
        sources: for each problem, the text of each source file by its path.
        load_inline: `torch.utils.cpp_extension.load_inline`, or a function that takes the same
            keyword arguments. It is called once for each extension that is compiled.

    Returns:
        For each problem the namespace of its operators, `torch.ops.<namespace>`.

    Raises:
        BuildError: an extension is not in the cache and cannot be built, or TORCH_CUDA_ARCH_LIST
            is wrong; the message says why.
    """
    tools = toolchain.find_toolchain()
    extensions = [_make_extension(problem, texts, tools) for problem, texts in sources.items()]
    not_loaded = [extension for extension in extensions if not _is_loaded(extension)]
    if not_loaded:
        folder = cache.choose_folder()
        cache.remove_leftovers(folder)
        try:
            _Builder(folder, tools, load_inline).load_or_build(not_loaded)
        except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
            raise explain(error, folder) from None
    return {extension.problem: extension.namespace for extension in extensions}


def _make_extension(problem: str, sources: Mapping[str, str], tools: Toolchain) -> Extension:
    """Make the extension of a problem, with its flags and key."""
    flags = toolchain.cpu_flags()
    if tools.targets:
        flags = [*flags, "-DKERNELS_WITH_CUDA"]
    parts_of_key = [
        dict(sources),
        flags,
        toolchain.CUDA_FLAGS,
        # nvcc takes these as flags too.
        [os.environ.get(name) for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")],
        [torch.__version__, torch.version.git_version],
        # This suffix names the CPU's architecture and Python's version. The version counts because
        # torch links extensions to libtorch_python.
        importlib.machinery.EXTENSION_SUFFIXES[0],
    ]
    key = hashlib.sha256(json.dumps(parts_of_key).encode()).hexdigest()[:16]
    return Extension(problem, sources, flags, key)


def _is_loaded(extension: Extension) -> bool:
    """Return whether this process has already loaded a library of the extension's name.

    Folders are not compared: a library that this process has built was loaded from the folder
    `unfinished-...`, which was renamed afterwards.
    """
    return any(Path(library).stem == extension.name for library in torch.ops.loaded_libraries)


def _fits(build: cache.Build, tools: Toolchain) -> bool:
    """Return whether a build has code for all GPUs, and comes from the compilers found here.

    A compiler that is missing here is not compared: a container may have the cache but no compiler.
    """
    for target in tools.targets:
        if not toolchain.compatible_targets(target) & set(build.targets):
            return False
    for compiler, version in tools.compilers.items():
        if version and version != build.compilers.get(compiler):
            return False
    return True


@dataclass(frozen=True)
class _Builder:
    """Loads extensions from the cache, and builds those that are not there.

    Attributes:
        folder: the cache folder.
        tools: the compilers and GPUs of this machine.
        load_inline: as in `load_extensions`.
    """

    folder: Path
    tools: Toolchain
    load_inline: LoadInline

    def load_or_build(self, extensions: list[Extension]) -> None:
        """Load the extensions that are in the cache, then build all others together."""
        not_in_cache = []
        for extension in extensions:
            if not self._load_from_cache(extension):
                not_in_cache.append(extension)
        if not_in_cache:
            self._build_all(not_in_cache)

    def _load_from_cache(self, extension: Extension) -> bool:
        """Load a finished build that fits this machine. Return whether there is one."""
        for build in cache.finished_builds(self.folder, extension.name):
            if not _fits(build, self.tools):
                continue
            try:
                torch.ops.load_library(str(build.library))
            except OSError:
                # A host that shares the folder may have linked the library to a newer glibc.
                continue
            return True
        return False

    def _build_all(self, extensions: list[Extension]) -> None:
        """Build several extensions, each in a thread of its own; with MAX_JOBS=1, in one thread."""
        # torch starts up to MAX_JOBS compilers for each extension. So two threads would run two
        # compilers even with MAX_JOBS=1.
        threads = 1 if os.environ.get("MAX_JOBS") == "1" else len(extensions)
        cache.check_executable(self.folder)
        toolchain.check_tools(self.tools)
        toolchain.warn_of_ignored_targets()
        # While torch loads a library it changes the process's flags for dlopen, and then restores
        # them. If two threads load, the second may find the first one's flags, and restore those.
        dlopen_flags = sys.getdlopenflags()
        try:
            with (
                _announce_slow_build(extensions, self.folder),
                _silence_torch(),
                toolchain.build_environment(self.tools),
                ThreadPoolExecutor(threads) as pool,
            ):
                # `list` raises a thread's exception. The end of `with` waits for the other threads.
                list(pool.map(self._build, extensions))
        finally:
            sys.setdlopenflags(dlopen_flags)

    def _build(self, extension: Extension) -> None:
        """Compile and load an extension, and publish the build in the cache."""
        with cache.build_lock(self.folder, extension.name):
            # While this process waited, another one may have been killed, or have built it.
            cache.remove_leftovers(self.folder)
            if self._load_from_cache(extension):
                return
            with cache.unfinished_folder(self.folder) as build_folder:
                self._compile_and_load(extension, build_folder)
                library = build_folder / f"{extension.name}.so"
                build = cache.Build(library, self.tools.targets, self.tools.compilers)
                cache.publish(build_folder, build)

    def _compile_and_load(self, extension: Extension, build_folder: Path) -> None:
        """Compile an extension in the folder of its build, and load it from there.

        The sources are written to files. `load_inline` gets texts that only include these files, so
        that a compiler's error names the real file and line.
        """
        for path, text in extension.sources.items():
            file = build_folder / "kernels" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        toolchain.link_cuda_runtime(self.tools, build_folder)
        namespace_flag = f"-DKERNELS_NAMESPACE={extension.namespace}"
        speed_flags = toolchain.GCC_SPEED_FLAGS if self.tools.is_gcc else []
        # torch adds `_v1` to the name of an extension that this process builds a second time.
        # Removing torch's record of the first time prevents that.
        toolchain.cpp_extension().JIT_EXTENSION_VERSIONER.entries.pop(extension.name, None)
        self.load_inline(
            name=extension.name,
            cpp_sources=_include_all(extension, ".cpp"),
            cuda_sources=_include_all(extension, ".cu") if self.tools.targets else None,
            # The compilers run in build_folder, so the paths in -Ikernels and -L. begin there. nvcc
            # gets no -D flags: only .cpp files use the macros.
            extra_cflags=[*extension.cxx_flags, *speed_flags, namespace_flag, "-Ikernels"],
            extra_cuda_cflags=["-Ikernels", *toolchain.cuda_flags(self.tools.targets)],
            extra_ldflags=["-fopenmp", "-L."],
            build_directory=str(build_folder),
            no_implicit_headers=True,
            is_python_module=False,
        )


def _include_all(extension: Extension, suffix: str) -> str:
    """Return a source text that includes all source files with this suffix."""
    paths = [path for path in extension.sources if path.endswith(suffix)]
    return "".join(f'#include "{path}"\n' for path in paths)


@contextlib.contextmanager
def _announce_slow_build(extensions: list[Extension], folder: Path) -> Iterator[None]:
    """If the build takes more than `QUIET_S`, say what it does, and at the end how long it took."""
    problems = " and ".join(extension.problem for extension in extensions)
    announcement = (
        f"compiling {problems}. This happens once, and usually takes less than a minute. The "
        f"result is kept in {folder}"
    )
    start = time.monotonic()
    timer = threading.Timer(QUIET_S, say, [announcement])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    seconds = time.monotonic() - start
    if seconds > QUIET_S:
        say(f"ready after {seconds:.0f} s")


@contextlib.contextmanager
def _silence_torch() -> Iterator[None]:
    """Silence torch's build tools, which warn that there is no GPU, and that clang is not GCC."""
    logger = logging.getLogger("torch.utils.cpp_extension")
    # A filter passes only the records of the logger that it names. No logger has this name.
    silence = logging.Filter("nothing has this name")
    logger.addFilter(silence)
    try:
        yield
    finally:
        logger.removeFilter(silence)
