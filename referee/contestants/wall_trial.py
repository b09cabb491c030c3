"""Tries whether contestants on a device can have walls, see `namespaces`.

The trial starts a contestant and has it compute something. It fails in two cases:

- The system allows no namespaces, or the user has capabilities without being root.
- On a GPU, CUDA IPC does not work through the walls. IPC handles contain process ids, and a process
  has another id inside its namespace than outside. So it depends on the driver whether the referee
  and the contestant can open each other's handles.

`python -m referee.contestants.wall_trial [DEVICE]` runs the trial and prints its result. The exit
status is 0, or 2 if there is no such device.
"""

import base64
import sys
from time import monotonic

import torch

from referee.call_names import MODULE
from referee.contestants import processes
from referee.contestants.contestant import Contestant
from referee.contestants.errors import EndedError, ForgedError, RaisedError, TimeLimitError
from referee.contestants.forms import pack
from referee.contestants.pool import Pool
from referee.contestants.reading import BadDescriptionError, UnreadableError
from referee.contestants.region import Region
from referee.contestants.role import Role
from referee.contestants.server import Server
from referee.devices import choose_device

TRIAL_SECONDS = 60.0  # time limit of the trial
PROBE_TEXT = b"""
from torch import nn


class ModelNew(nn.Module):
    def forward(self, x):
        return x + 1
"""
_obstacles: dict[torch.device, str | None] = {}  # by device; each is tried once


def find_obstacle(server: Server, device: torch.device) -> str | None:
    """Return why contestants on a device cannot have walls; None if they can.

    The caller must be in a `with processes.subreaper()` block, and no solution may run yet: the
    trial's process is treated as one, see `processes.ProcessTree`.

    Args:
        server: forks the trial's process; its attribute `gives_walls` must be True.
        device: where they compute.
    """
    if device not in _obstacles:
        pool = Pool(device)
        try:
            _obstacles[device] = _run_trial(server, pool, device)
        except (EndedError, ForgedError, TimeLimitError, RaisedError) as error:
            _obstacles[device] = f"{type(error).__name__}: {error}"
        except (UnreadableError, BadDescriptionError) as error:
            _obstacles[device] = f"a result cannot be read: {error}"
        finally:
            pool.close()
    return _obstacles[device]


def _run_trial(server: Server, pool: Pool, device: torch.device) -> str | None:
    """Run the trial; return why walls are impossible, or None.

    Memory is shared in both directions: a module in a namespace reads the referee's values and adds
    1 to them, and the referee reads the result in the module's memory.

    Raises:
        BadDescriptionError, UnreadableError: the referee cannot open the result's memory.
        EndedError, ForgedError, TimeLimitError, RaisedError: the module fails, as it does if its
            process cannot open the referee's memory.
    """
    values = torch.arange(16.0, device=device)
    region = Region(pool)
    region.make_room([values])
    region.write([values])
    deadline = monotonic() + TRIAL_SECONDS
    contestant = Contestant(server, pool, device, Role.SOLUTION, deadline)
    try:
        if not contestant.has_walls:
            return "the system allows no namespaces, or the user has capabilities but is not root"
        text = base64.b64encode(PROBE_TEXT).decode()
        contestant.ask(
            "import_file", text=text, path="probe.py", class_names=["ModelNew"], folders=[]
        )
        contestant.ask("construct", arguments=pack([]), seed=0, dtype="")
        reply = contestant.ask("run_forwards", call_name=MODULE, inputs=[region.location])
        result = contestant.reader.read_whole(reply["returned"][0]["results"][0])
        if not torch.equal(result, values + 1):
            return "the referee reads another result"
        return None
    finally:
        contestant.close()


def main() -> int:
    """Print whether contestants on a device get walls; return the exit status.

    The device is the first argument of the command line, or the first GPU.
    """
    try:
        device, _ = choose_device(sys.argv[1] if len(sys.argv) > 1 else "cuda")
    except ValueError as error:
        print(f"wall_trial: {error}", file=sys.stderr)
        return 2
    with processes.subreaper():
        server = Server()
        try:
            obstacle = find_obstacle(server, device)
        finally:
            server.close()
    print(f"{device}: no walls, {obstacle}" if obstacle else f"{device}: walls")
    return 0


if __name__ == "__main__":
    sys.exit(main())
