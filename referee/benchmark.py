"""Every speed figure beside the headline: `python -m referee.benchmark [what] [options]`.

sizes     ModelNew against torch.relu over powers of two
views     the same for views that are not dense
linear    LinearReluDivideNew against eager over rows and features, at one --precision
layouts   the same with transposed operands, forward and training step
operands  float32: the same on operands of every kind, with errors and memory, at one --precision
host      what a forward, and a training step, cost the host: 1,024 elements, and [1, 64] -> 64
import    seconds to import the solution, beyond torch's
all       all of them
report    the figures of README and docs for this device, in their places; --only takes some
"""

import argparse
import sys

import torch

from referee import cases
from referee.benchmarks import figures, operand_table, timings
from referee.report.tables import environment

NAMES = ["sizes", "views", "linear", "layouts", "operands", "host", "import"]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line's options; on a wrong one the process ends with status 2."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", default="all", choices=[*NAMES, "all", "report"])
    best = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=torch.device, default=torch.device(best))
    parser.add_argument("--dtype", default="float32", metavar="NAME[,NAME]", help="of the figures")
    parser.add_argument("--precision", choices=["highest", "high", "medium"], default="highest")
    parser.add_argument("--trials", type=int, help="timed pairs of each line of operands")
    parser.add_argument("--only", default="", metavar="TEXT", help="commands that contain this")
    args = parser.parse_args(arguments)
    args.dtypes = args.dtype.split(",")
    known = cases.served(torch.device("cpu"))
    if unknown := [name for name in args.dtypes if name not in known]:
        parser.error(f"--dtype: expected some of {', '.join(known)}, got {', '.join(unknown)}")
    args.todo = NAMES if args.what == "all" else [args.what]
    if args.what == "operands" and args.dtypes != ["float32"]:
        parser.error("operands is a figure of float32")
    return args


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    args = parse(arguments)
    if args.what == "report":
        try:
            return 1 if figures.measure(figures.Pages(), args.device.type, args.only) else 0
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
    torch.set_float32_matmul_precision(args.precision)
    device = args.device
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    about = environment(device)
    print(f"{about['device']}, torch {about['torch']}, CUDA {about['cuda']}")
    if "import" in args.todo:
        timings.show(timings.imports())
    for dtype in args.dtypes if args.todo != ["import"] else ():
        precision = f", precision {args.precision}" if dtype == "float32" else ""
        print(f"\n{dtype}{precision}")
        setting = timings.Setting(device, cases.DTYPES[dtype])
        for name in ("sizes", "views", "linear", "layouts"):
            if name in args.todo:
                timings.show(getattr(timings, name)(setting))
        if "operands" in args.todo and dtype == "float32":
            timings.show(operand_table.rows(setting, args.precision, args.trials))
            print(operand_table.LEGEND)
        for problem in timings.SMALL if "host" in args.todo else ():
            if problem == "relu" or setting.dtype.is_floating_point:
                timings.show(timings.host(setting, problem))
    return 0


if __name__ == "__main__":
    sys.exit(main())
