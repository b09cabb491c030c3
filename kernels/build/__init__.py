"""From the text of the sources to a loaded extension, or to a single-file bundle.

extension.py   loads the problems' extensions, and builds those that are not in the cache
toolchain.py   the compilers of this machine, what to compile for, and with which flags
cache.py       the cache of builds on disk: where it is, and which builds may be loaded
errors.py      BuildError, messages to the user, and the cause of an error in a compiler's output
bundle.py      the single-file bundle of `python run.py PROBLEM --bundle FILE`

`model_new.py` calls `load_extensions` of extension.py, which uses the three files after it:

    load_extensions     toolchain: which compilers, GPUs and flags are there?
                        make the key of each extension, from its sources and flags
      _Builder          cache: is there a finished build that fits?  ->  load it
                        otherwise compile, load and publish it in the cache
      explain           if that fails: search the compilers' output for the cause (errors.py)

Of these files, bundle.py uses only toolchain.py, and there only CXX_FLAGS and CUDA_FLAGS.
"""
