"""Tests of the project as a whole.

test_readme          README, documents and docstrings
test_problems        `problems/`
test_third_problem   what a third problem needs: the files of third_problem/
"""
