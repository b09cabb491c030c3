"""Judges from outside whether a PyTorch module is right, and how fast it is compared with eager.

    from referee import Reference, grade

    result = grade(Reference("problem.py"), "solution.py")
    print(result.verdict, result.speedup, result.reason)

`README.md` is for those who grade solutions. `VERDICTS.md` says how a verdict is made, and
`PROTECTION.md` how a solution is kept from cheating. For those who change
the referee, `INTERNALS.md` follows a command from function to function, explains the words, and
says where to add a check.

These are the parts of the package, from top to bottom. A part may import only the parts below it:

__main__: `python -m referee`

project/: the command line of a project with problems of its own; `python -m referee` has no use for
it
    project_command      the command line; it chooses one of the kinds of work below
    project_arguments    its arguments and options
    project              `Project`: what a project tells the command
    compare_with_eager   compares the project's own solution with eager
    sweep, roofline      time that solution at many sizes; the least time of each size

program/: the command line of `python -m referee`
    command              the command line: grades files on a reference, or folders on folders
    arguments            its arguments and options
    grade_files          grades files on one problem and prints a line on each
    file_grader          grades files on one problem after the other, for `grade_files` and project/
    folders              grades folders of solutions on folders of references
    file_queue           the solutions that wait for a worker
    folder_workers       a worker for each device, which grades the files of a folder
    fork_server          the process from which workers are forked
    pairs                which solution goes with which reference
    empty_call           a program that measures what an empty call costs

api: `Reference`, `grade`, `grade_all`, `Result` and `BadReferenceError` for Python

records: results as JSON

engine: makes the checks of a file, and a verdict of what they raise

checks/: what is asked of a solution; `checks/__init__` lists the checks in their order
    import_file          the import
    own_cases            the problem's own small inputs
    values               whole results at the timed size
    buffers              buffers that the reference's forward changes
    other_inputs         inputs that `get_inputs` would not draw
    timed_forwards       forwards beside eager's
    gradients            gradients of inputs and parameters
    other_gradients      gradients for inputs of both signs
    step_memory          results and gradients while later steps run
    timed_training_steps a forward and its backward beside eager's
    forward, solution_step, returned_results, separate_results, copied_results, turn_memory, intact,
    diagnosis            functions that several checks use

rounds/: timed rounds
    timed_requests       a timed request; how many calls it has
    timed_steps          a timed request of training steps
    turns                the turns of a round, in random order
    samples              the samples of all rounds; whether the solution's clock is false
    step_samples         samples of training steps, divided into forward and backward
    early_elements       elements of results, read before the clock stops
    round_memory         whether processes keep unused GPU memory in a round
    slow_eager           whether a solution has slowed eager

grading: `Grading`, which has what the checks of a file share

resources: `Resources`, which the gradings of one problem share: memory, eager's processes, plans

eager_processes: those in which eager runs, which all solutions of a problem use

request_memory: the shared memory of requests: inputs, gradients of outputs, copies of results

verdict: `Verdict`; words for exceptions and crashes

reference/: the reference
    file                 a problem as a KernelBench file defines it
    problem              `Problem`: its inputs, its results, and how far off results may be
    module               `ReferenceModule`: the reference's module, whose parameters change
    input_source         draws inputs
    first_forward        what the reference's forwards are like; whether solutions can be compared
    reference_step       the reference's results and gradients of a training step
    float64, tf32        the reference in float64, also with operands rounded to TF32
    operators            the operators that the reference calls and the length of their sums
    dtypes               the dtypes that the user can choose
    unusual_inputs       inputs that `get_inputs` would not draw
    trivial_results      results of the reference that need no computing
    other_roundings      a mode in which the reference rounds otherwise
    in_parts             changes a tensor in place, a part at a time, to save memory
    random_values        seeds and values of inputs, parameters and gradients

comparison/: whether results are right
    case                 the description of a forward that is compared
    quantity             a result or gradient of training steps, over several draws
    gradient_rules       the rules by which such a gradient is wrong
    reference_tensor     a result of the reference, with which a solution's is compared
    result_spec          the demands on a result in any draw of inputs
    second_look          which wrong elements rounding explains
    mistakes             mistakes of a result in words
    budget               how far off a result may be
    reference_values     the values of a result of the reference; they tell how far off another is
    accuracy             the sizes of errors, and the accuracy class of a result
    compare              bits and distance of two tensors

times/: how fast it is
    two_clocks           the seconds of a call, from the process's clock and the referee's
    timings              the times of all rounds, as reports take them
    gain                 whether times are a gain: a word for a solution's times
    ratios               ratios of times with their intervals; percentiles
    round_limit          how many rounds are timed; the loop that runs them

child/: the code that runs in a contestant's process

contestants/: the processes of solutions and of eager, and their memory
    `contestants/__init__` lists the modules, and has a picture of the shared memory

report/: texts and pictures of results
    tables               parts of all texts
    graded_files         the line on a graded file; the ranking of several
    folder_table         the table of graded folders
    comparison_tables    what a comparison with eager prints
    sweep_lines          what a sweep prints
    markdown, plot       the file of --markdown; the picture of a sweep
    files                writes files as a whole or not at all

console: prints lines and progress; what Ctrl-C does

devices: the device that the user names, or the best one

message_lines: lines of messages

call_names: the names of calls

verdict_words: the words of verdicts and times
"""

import os
import warnings

# Both settings must be made before torch is imported.
# By default OpenMP's threads spin for milliseconds after their work. They would take cores from the
# process that is timed next.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# torch warns if NumPy is missing, which the referee does not need.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

API_NAMES = ("BadReferenceError", "Reference", "Result", "grade", "grade_all")


def __getattr__(name: str) -> object:
    """Import the API when one of its names is used: it imports torch, which takes seconds."""
    if name not in API_NAMES:
        raise AttributeError(f"module 'referee' has no attribute {name!r}")
    from referee import api

    return getattr(api, name)
