"""Fuzzing: random programs through torch.compile against eager, random loop programs against the oracle.

`programs.py` says what a program is, `table.py` and `generate.py` draw one, `engines.py` are the ways to run it, which
`together.py` gives one trace, `judge.py` compares, `shrink.py` makes a failing one small. `pre_grad.py` draws programs
for the passes before autograd, and judges what the passes alone make of them. `loops.py` does the same for loop
programs, which are made of `choices.py`; `__main__.py` is the command `python -m tests.fuzz`.
"""
