"""The command line of a project that has problems and a solution of its own.

`python -m referee` does not use this folder. A project's program calls `project_command.main` with
a `Project`; it then grades files as `python -m referee` does and, in addition, its own solution.
"""
