"""The command line of `python -m referee`: its options, and the grading of files and folders."""
