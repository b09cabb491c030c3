"""Contestants: the processes in which solutions and eager run, their memory and their walls.

From top to bottom; a module imports only modules below it:

    wall_trial    whether contestants on a device can have walls: a trial with one of them
    state         a contestant's parameters and buffers, moved into shared memory by requests to it
    contestant    `Contestant`: such a process, as the referee sees it
    role          a solution or eager: what such a process may do
    server        starts the process that forks contestants; child/ has its code
    pipes         requests, replies and output of a contestant
    errors        how a contestant can fail to answer
    reading       reads results in a contestant's memory
    descriptions  describes results: their nesting, and where they are in memory
    region        a list of values in shared memory, such as the inputs of a call
    pool          the memory that the referee shares, in blocks
    forms         shape, strides and dtype of values
    cuda_ipc      GPU memory that two processes share
    free_memory   how much memory is free
    namespaces    walls between processes: starts a contestant in a namespace of its own
    capabilities  the rights of root, which a contestant must not gain by its namespace
    processes     stops, continues and ends processes
    prctl         Linux's settings of a process
    libc          the C library
    execute       executes a file's text as a module
    autograd      a forward that autograd records, and its backward
    seeding       seeds the global generators of torch, Python and NumPy

Values such as a call's inputs are in shared memory, at these levels:

    pool       all memory that the referee shares: on a CPU, one file in memory (a memfd)
    block      consecutive bytes of the pool; on a GPU, an allocation of its own
    region     the values of one call, in one block
    storage    the bytes of one or several of these values
    tensor     a view of a storage; its form has the offset, shape, strides and dtype

    pool    |  block                            |  block               |  ...
    region  |  inputs of the first call         |  inputs of the second call
    storage |  x and its view x.t()  |  mask    |  ...

Requests and replies hold three kinds of dictionaries about values:

    form          shape, strides and dtype of a value, and its part of a storage; see `forms`
    location      from the referee: where a region's values are in shared memory; see `region`
    description   from the contestant: a result's form, and where it is in the memory of the
                  contestant's own process; see `descriptions`. It may be false.

A result takes this way: `child.kept_results` keeps and describes it, `checks.returned_results`
compares the description with the reference's result, and `reading` reads the values.
"""
