"""Folders of references and solutions: paired by name, graded by workers, summed up."""

import argparse


def is_folder(args: argparse.Namespace) -> bool:
    """Return whether the command is about folders."""
    return bool(args.reference) and args.reference.is_dir()


def grade(*_: object) -> int:
    """TODO."""
    return 2
