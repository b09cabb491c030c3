"""From the text of the sources to a loaded extension, or to a single-file bundle.

extension.py   loads the problems' extensions, and builds those that are not in the cache
toolchain.py   the compilers of this machine, what to compile for, and with which flags
cache.py       the cache of builds on disk: where it is, and which builds may be loaded
errors.py      BuildError, and the search for the cause in a compiler's output
bundle.py      the single-file bundle of `python run.py PROBLEM --bundle FILE`
"""
