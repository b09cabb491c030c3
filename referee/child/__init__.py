"""The process in which a solution runs: it does what `remote` asks for, and judges nothing.

Tensors come in the first half of the mapped file, and go in the second. Whatever the solution may
want to replace is bound, or its identity noted, before the solution is loaded.
"""
