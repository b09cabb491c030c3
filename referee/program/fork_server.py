"""The process from which the workers of folders are forked, see `folder_workers`.

It imports torch once for all workers. The command starts it before it imports torch itself, so both
imports take place at the same time. For that, this module must not import torch.
"""

import multiprocessing
from multiprocessing import forkserver

# A fork of the command's own process could not use CUDA, which the command has initialized. The
# fork server never initializes it.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    ["referee.program.folder_workers", "torch.fx.experimental.symbolic_shapes"]
)


def start() -> None:
    """Start the process if it does not run yet; it imports modules while the caller goes on."""
    forkserver.ensure_running()
