"""Finds out if a GPU's memory can be shared with a process in a namespace of its own.

CUDA's IPC handles contain ids of processes, so that it depends on the driver. It is tried once for
each device: `python -m referee.cuda_walls` says what comes out. Where it fails, a GPU's contestants
have no namespaces, see `namespaces`.
"""

import base64
import sys
from time import monotonic

import torch

from referee import processes
from referee.contestant import (
    Contestant,
    EndedError,
    ForgedError,
    LateError,
    RaisedError,
    Server,
)
from referee.names import MODULE
from referee.reading import BadDescriptionError, UnreadableError
from referee.shared import Pool, Region, pack

SECONDS = 60.0
MODULE_TEXT = b"""
from torch import nn


class ModelNew(nn.Module):
    def forward(self, x):
        return x + 1
"""
_reasons: dict[torch.device, str] = {}  # what came out, by device


def why_none(server: Server, device: torch.device) -> str:
    """Return why a GPU's contestants cannot have walls, or "" if they can.

    It is called within `processes.reaping`, while no solution is there, of a server with walls.
    """
    if device not in _reasons:
        pool = Pool(device)
        try:
            _reasons[device] = _try(server, pool, device)
        except (EndedError, ForgedError, LateError, RaisedError) as error:
            _reasons[device] = f"{type(error).__name__}: {error}"
        except (UnreadableError, BadDescriptionError) as error:
            _reasons[device] = f"a result cannot be read: {error}"
        finally:
            pool.close()
    return _reasons[device]


def _try(server: Server, pool: Pool, device: torch.device) -> str:
    """Have a module in a namespace add 1 to the referee's memory, and read the result in its own.

    Raises:
        BadDescriptionError, UnreadableError: it has no handle, or that does not open here.
        EndedError, ForgedError, LateError, RaisedError: it does not answer.
    """
    values = torch.arange(16.0, device=device)
    region = Region(pool)
    region.place([values])
    region.write([values])
    contestant = Contestant(server, pool, device, monotonic() + SECONDS)
    try:
        if not contestant.has_walls:
            return "the system allows no namespaces of processes"
        text = base64.b64encode(MODULE_TEXT).decode()
        contestant.ask("import_file", text=text, path="probe.py", names=["ModelNew"], folders=[])
        contestant.ask("construct", arguments=pack([]), seed=0, dtype="")
        reply = contestant.ask("call", name=MODULE, inputs=[region.form])
        found = contestant.reader.whole(reply["calls"][0]["results"][0])
        return "" if torch.equal(found, values + 1) else "another result is read"
    finally:
        contestant.close()


def main() -> None:
    """Print whether a device's contestants can have walls."""
    device = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cuda:0")
    with processes.reaping():
        server = Server()
        try:
            reason = why_none(server, device)
        finally:
            server.close()
    print(f"{device}: no walls, {reason}" if reason else f"{device}: walls")


if __name__ == "__main__":
    main()
