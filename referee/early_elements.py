"""Some elements of a GPU's results, read before the clock stops."""

import math
import random
from contextlib import suppress

import torch

from referee.bench import Bench
from referee.contestant import Contestant
from referee.reading import LARGEST_NUMBER, BadDescriptionError, UnreadableError, checked

LOOKED_AT = 32  # elements of a request's results


class EarlyElements:
    """Elements of a GPU's results that are read after the reply and before the clock stops.

    Work can be queued on a GPU behind a false reply, and it runs on while the process is stopped.
    Which elements are read is chosen when the reply is there. They must be the same when the whole
    results are read: what was not computed while the clock ran differs. A process on a CPU is
    stopped, which is enough, and nothing is read.

    Args:
        bench: the problem's.
        process: whose results are read.
    """

    def __init__(self, bench: Bench, process: Contestant) -> None:
        self._is_needed = bench.problem.device.type == "cuda" and not bench.copies
        self._reader = process.reader
        # Keys: the call's index, the result's index. Values: flat indices, and the elements there.
        self._seen: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def read(self, reply: dict) -> None:
        """Read some elements of one result of each call, chosen at random."""
        if not self._is_needed:
            return
        calls = reply["calls"]
        count = max(1, LOOKED_AT // max(len(calls), 1))
        for call_index, call in enumerate(calls):
            with suppress(BadDescriptionError, UnreadableError):  # the comparison reports it
                self._read_one(call_index, call["results"], count)

    def _read_one(self, call_index: int, descriptions: list[dict], count: int) -> None:
        """Read some elements of one of a call's results."""
        readable = [i for i, description in enumerate(descriptions) if description.get("handle")]
        if not readable:
            return
        result_index = random.choice(readable)
        size = math.prod(checked(descriptions[result_index])["shape"])
        if 0 < size < LARGEST_NUMBER:
            indices = torch.randint(size, (count,))
            values = self._reader.elements(descriptions[result_index], indices).cpu()
            self._seen[call_index, result_index] = indices, values

    def differs(self, call_index: int, result_index: int, whole: torch.Tensor) -> bool:
        """Return whether the elements that were read early have other bits in the whole result.

        Args:
            call_index: which call of the request.
            result_index: which of its results.
            whole: the result, read after the clock has stopped.
        """
        if (call_index, result_index) not in self._seen:
            return False
        indices, values = self._seen[call_index, result_index]
        now = whole.reshape(-1)[indices.to(whole.device)].cpu()
        return not torch.equal(now.view(torch.uint8), values.view(torch.uint8))
