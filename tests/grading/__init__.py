"""The program `run.py`, and files that it grades.

test_run, test_results        the command line and its output
test_solutions, test_solutions_by_problem, test_reference_files    graded files
test_planted_faults           faults in copies of the kernels
cheats, honest, solutions/    the files that are graded; solutions/ has designs for a GPU too
graded, result_files          grade a table of files; check the shape of JSON and Markdown files
"""
