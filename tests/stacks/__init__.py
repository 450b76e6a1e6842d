"""Random stacks of modules through torch.compile, against eager.

`layers` draws one layer for what came before it, `stack` is a stack as data and as text, `judge` runs and compares,
`shrink` makes a failing stack smaller. The command is `python -m tests.stacks`; its workers are those of `tests/fuzz`.
"""
