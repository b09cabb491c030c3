"""Names that reports, problems and processes share."""

COPY = "copy"
COPY_REUSED = "copy, fresh memory"
COMPILED = "torch.compile"
MODULE = "module"  # the contestant's own module
NOTHING = "nothing"  # the empty call: a module that returns a tensor that is there
