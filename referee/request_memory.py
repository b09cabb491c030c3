"""The shared memory of requests: inputs, gradients of outputs, and copies of results."""

from collections.abc import Sequence

import torch

from referee.contestants.pool import Pool
from referee.contestants.region import Region

# Tensors with the shapes and dtypes of a call's results; None where the reference has no result.
Templates = Sequence[torch.Tensor | None]


class RequestMemory:
    """The shared memory that all requests on one problem use.

    The first call of a request has the first region of each list, the second call the second one.

    Args:
        device: where contestants compute.

    Attributes:
        pool: the memory of the regions, and of parameters.
        inputs: regions with the arguments of calls.
        output_gradients: regions with the gradients of outputs, for training steps.
        outputs: regions to which results are copied, where they cannot be read in place.
        are_results_copied: whether processes copy results within the clock, because the referee
            cannot read them in place.
    """

    def __init__(self, device: torch.device) -> None:
        self.pool = Pool(device)
        self.inputs = [Region(self.pool)]
        self.output_gradients = [Region(self.pool)]
        self.outputs: list[Region] = []
        self.are_results_copied = False

    def write_inputs(self, inputs_of_calls: list[list]) -> None:
        """Write the arguments of a request's calls, a list for each call."""
        self._write(self.inputs, inputs_of_calls)

    def write_output_gradients(self, gradients_of_calls: list[list[torch.Tensor]]) -> None:
        """Write the gradients of outputs of a request's training steps, a list for each step."""
        self._write(self.output_gradients, gradients_of_calls)

    def input_locations(self, call_count: int) -> list[dict]:
        """Return the locations of the inputs of a request's first `call_count` calls."""
        return [region.location for region in self.inputs[:call_count]]

    def output_gradient_locations(self, call_count: int) -> list[dict]:
        """Return the locations of the gradients of outputs of a request's first training steps."""
        return [region.location for region in self.output_gradients[:call_count]]

    def room_for(self, templates_of_calls: list[Templates]) -> list[dict] | None:
        """Make room for copies of a request's results; return where they go.

        Args:
            templates_of_calls: for each call, tensors with the shapes and dtypes of its results.

        Returns:
            A location for each call; None if results are read in place.
        """
        if not self.are_results_copied:
            return None
        self._add_regions(self.outputs, len(templates_of_calls))
        regions = self.outputs[: len(templates_of_calls)]
        for region, templates in zip(regions, templates_of_calls, strict=True):
            region.make_room([torch.empty(0) if x is None else x for x in templates])
            region.fill_with_nan()  # so that no contestant finds another's results there
        return [region.location for region in regions]

    def forget(self) -> None:
        """Drop the values that were written, so that their memory is freed; see `Region.forget`."""
        for region in (*self.inputs, *self.output_gradients):
            region.forget()

    def close(self) -> None:
        """Free the memory; all processes that use it must have ended."""
        self.pool.close()

    def _write(self, regions: list[Region], values_of_calls: list[list]) -> None:
        """Write a list of values into each region; add regions if there are more lists."""
        self._add_regions(regions, len(values_of_calls))
        for region, values in zip(regions, values_of_calls, strict=False):
            region.make_room(values)
            region.write(values)

    def _add_regions(self, regions: list[Region], count: int) -> None:
        """Add regions to a list until it has at least `count`."""
        while len(regions) < count:
            regions.append(Region(self.pool))
