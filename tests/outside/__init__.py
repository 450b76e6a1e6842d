"""PyTorch's own tests, with Ferrite in place of the backends that they name: `python -m tests.outside`.

    source.py    where the tests are: an unpacked source of PyTorch 2.6, which is no part of this project
    modules.py   which of its modules are run
    swap.py      a module loaded with its backends replaced, and bent where tests of 2.6 do not fit today's torch
    child.py     one module in a process of its own; a test that crashes or hangs is named
    results.py   what a test did, and which tests are asked of Ferrite
    known.py     the tests that do not pass, and why: `known.json`

A test is asked of Ferrite if it is *eligible*: with `aot_eager`, which compiles nothing, it passes, at least one graph
went through the replaced backend, and the test neither counts graphs without compiling them nor reads generated code.
So the tests that fail because torch is a newer one, and those about Inductor itself, are left out by measurement and
not by hand.
"""
