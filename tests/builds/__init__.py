"""The build of the kernels.

test_toolchain, test_build       the compilers; imports of `model_new.py`
cache/                           the cache of builds
test_bundle, test_two_versions   the one-file bundle, two versions in a process
"""
