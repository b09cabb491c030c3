"""The import of the solution's file, which must define the solution's class.

Meanwhile, if torch.compile is timed, eager's process imports the compiler.
"""

import base64
import math

from referee.grading import Grading


def import_file(grading: Grading) -> None:
    """Have the solution's process import the file; keep how long that took."""
    grading.progress("importing")
    if grading.options.compiled:
        grading.resources.eager.warm_compiler()
    reference_file = grading.problem.file
    reply = grading.solution.ask(
        "import_file",
        text=base64.b64encode(grading.file.text).decode(),
        path=str(grading.file.path.resolve()),
        class_names=list(reference_file.solutions),
        builds=grading.resources.server.builds_folder(grading.file.path),
        folders=[str(reference_file.path.resolve().parent), *reference_file.folders],
    )
    seconds = reply["seconds"]  # the solution may have changed them
    if isinstance(seconds, float) and math.isfinite(seconds):
        grading.verdict.import_seconds = seconds
