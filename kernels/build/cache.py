"""Finished builds on disk, as `<name>-<user>/build-<process>/`: which are trusted, who is next.

`manifest.json` comes last, by a rename, and has the library's SHA-256. What has none that is right
is never loaded, and is removed once its process is certain to be dead.
"""

import contextlib
import fcntl
import grp
import hashlib
import json
import os
import pwd
import re
import shutil
import stat
from errno import EAGAIN
from pathlib import Path

from kernels.build.toolchain import LOGGER, demand

# This process's locks, which a forked child would otherwise keep for as long as it lives.
HELD: set[int] = set()
os.register_at_fork(after_in_child=lambda: [os.close(HELD.pop()) for _ in [*HELD]])
HOST = ""  # this boot of this machine, and this container, where the system says
with contextlib.suppress(OSError):
    HOST = Path("/proc/sys/kernel/random/boot_id").read_text()
    HOST = hashlib.sha256(f"{HOST}{Path('/proc/self/ns/pid').readlink()}".encode()).hexdigest()[:12]


def intruder(path: Path) -> str:
    """Who besides this user and root may replace `path`, or a file in it; empty if nobody may.

    They may where it, or a folder above, is theirs, or writable by others or by a group that has
    others in it; but not below a folder that only its owner may enter, nor in one with the sticky
    bit. What lies above a home is the system's business, KERNELS_TRUSTED_FOLDER the user's.
    """
    trusted, home = os.environ.get("KERNELS_TRUSTED_FOLDER"), os.path.expanduser("~")  # noqa: PTH111
    places, found = (path, *path.parents), ""
    if trusted and Path(os.path.realpath(trusted)) in places:
        return ""
    for place in filter(os.path.lexists, places):
        state, writers = place.lstat(), 0o022
        if state.st_uid not in (0, os.geteuid()):
            return f"{place} belongs to user {state.st_uid}"
        if not state.st_mode & 0o011:
            found = ""
        with contextlib.suppress(KeyError):  # everybody may have a group of their name
            group, user = grp.getgrgid(state.st_gid), pwd.getpwuid(os.geteuid()).pw_name
            writers = 0o002 if {group.gr_name, *group.gr_mem} == {user} else 0o022
        is_sticky = stat.S_ISDIR(state.st_mode) and state.st_mode & stat.S_ISVTX
        if state.st_mode & writers and not is_sticky and not found:  # so is any symbolic link
            found = f"{place} is writable by others ({stat.filemode(state.st_mode)})"
        if place == Path(os.path.realpath(home)):
            break
    return found


def choose_folder(name: str) -> Path:
    """Where this user builds: in TORCH_EXTENSIONS_DIR, or torch's default if that is not safe."""
    default = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    roots = [os.environ.get("TORCH_EXTENSIONS_DIR"), f"{default}/torch_extensions"]
    for root in filter(None, roots):
        folder = Path(os.path.realpath(root), f"{name}-{os.geteuid()}")
        reason = "this user has no home" if root.startswith("~") else intruder(folder)
        if not reason:
            break
        LOGGER.warning("no builds of the kernels are kept in %s: %s", root, reason)
    remedy = "Set TORCH_EXTENSIONS_DIR to a folder that only you may write to, or"
    demand(not reason, f"{reason}. {remedy} KERNELS_TRUSTED_FOLDER to one that you trust")
    return folder


def finished_builds(folder: Path, name: str) -> list[tuple[Path, list[str]]]:
    """The libraries that may be loaded, with the targets that each holds code for.

    It removes what dead processes of this host left; their compilers may yet write there again.
    """
    found = []
    for build in sorted(folder.parent.glob(f"{name}-*/build-*")):
        library, manifest, targets = build / f"{name}.so", build / "manifest.json", None
        owner = re.match(r"build-((\w+)-(\d+)-\d+)-", build.name)
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            if not intruder(library) and not intruder(manifest):
                content = json.loads(manifest.read_bytes())
                if content["sha256"] == hashlib.sha256(library.read_bytes()).hexdigest():
                    targets = content["targets"]
        if targets is not None:
            found.append((library, targets))
        elif owner and owner[2] == HOST and owner[1] != process(owner[3]):
            shutil.rmtree(build, ignore_errors=True)
    return found


def process(number: str = "self") -> str:
    """A living process, as no other is ever called: host, number, start. Empty for a dead one."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        text = Path(f"/proc/{number}/stat").read_text()
        state, *fields = text.rpartition(")")[2].split()
        return f"{HOST}-{text.split()[0]}-{fields[18]}" if state not in "ZX" else ""
    return ""


def publish(library: Path, targets: list[str]) -> None:
    """Makes a build a finished one: readable by whom the umask says, writable by nobody else."""
    manifest, digest = library.with_name("manifest.new"), hashlib.sha256(library.read_bytes())
    manifest.write_text(json.dumps({"targets": targets, "sha256": digest.hexdigest()}))
    for path in (library, manifest):
        path.chmod(path.stat().st_mode & 0o755)
    manifest.rename(library.with_name("manifest.json"))


def take_turn(folder: Path, stack: contextlib.ExitStack) -> bool:
    """Whether this thread may build, until `stack` ends; all may where the disk has no locks."""
    with contextlib.suppress(BlockingIOError), contextlib.ExitStack() as attempt:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        lock = os.open(folder / "lock", flags, 0o600)
        attempt.callback(os.close, lock)
        with contextlib.ExitStack() as lockless:
            lockless.push(lambda _, error, __: getattr(error, "errno", EAGAIN) != EAGAIN)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        HELD.add(lock)
        attempt.callback(HELD.discard, lock)
        stack.enter_context(attempt.pop_all())
        return True
    return False
