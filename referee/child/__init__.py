"""The code of a contestant's process: it answers the referee's requests and judges nothing.

From top to bottom; a module imports only modules below it:

    main               forks contestants' processes; receives requests and sends replies
    request_handler    answers requests: a method for each
    held_module        the module: its import, its construction, its parameters
    probes             what a call tells about the module
    call_timer         runs and times the calls of a request
    clock              the clock with which it times them
    kept_results       keeps results while the referee reads them, and describes them
    mapping            the memory that the referee shares, as this process maps it
    nan_memory         fills memory with NaN
    yardsticks         functions that eager's process times, to show what the device can do

The referee's process and this one both use modules of `contestants/`, and `call_names`. A
solution's process holds no expected result and no object of the referee's.
"""
