"""Helpers for tests: those of the referee, and those of a project that uses it.

Like the tests, they need pytest, and `pip install ./referee` leaves them out.

texts           the texts of files to grade; tables of such files and of their right verdicts
graded          grades such a table, and checks the verdicts
shared_server   one server of the referee for many tests
mounts          file systems, for example full ones
seeds           makes torch.manual_seed quick
"""
