"""Contestants: the processes in which solutions and eager run, their memory and their walls."""
