"""Conformance: every op of PyTorch's own op database, compiled, against the same op in eager.

`cases.py` says which cases exist and names them, `check.py` runs one and judges it, `known.py` holds the failures we
accept and why, `sweep.py` runs many in worker processes, `__main__.py` is the command `python -m tests.ops`.
"""
