"""The cache of builds.

conftest             fixtures: the caches' folder, and processes that build and load
test_builders        many processes build and load at once; builders are killed or stopped
test_stored_builds   damaged builds, their file systems and the owners of their folders
"""
