"""The command, in its parts: options, sessions, folders, records and the terminal."""
