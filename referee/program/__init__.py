"""The command line: its options, sessions and folders."""
