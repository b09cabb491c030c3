"""From the text of the sources to a loaded extension, or to a single-file bundle.

extension.py   loads both problems' extensions; builds those that no finished build is found for
toolchain.py   the compilers of this machine, what to compile for, and with which flags
cache.py       finished builds on disk: where they are kept, and which may be loaded
errors.py      BuildError, and the first real error in a compiler's output
bundle.py      `python run.py PROBLEM --bundle FILE`
"""
