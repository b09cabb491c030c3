"""Grades any file that defines `ModelNew`: in a process of its own, judged from this one.

References, random numbers and verdicts are here, where the solution cannot reach them; eager is
timed in further processes. A verdict of `cheating` names what an honest program does not do by
accident; all else that is not right is `wrong`.

`grade` goes from files to verdicts. `checks` asks for results and compares, `backward` for
gradients, `turns` times a call. `judge` is the course of a grading, `problem` those of reference
files and of this project's problems, whose cases `referee.relu` and `referee.linear_relu_divide`
have. `oracle` knows what is right, and `budget` how nearly.
"""
