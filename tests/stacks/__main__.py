"""The command `python -m tests.stacks`: random stacks of modules, each difference shrunk and printed as a script.

    python -m tests.stacks --programs 3000 --seed 7    against eager, with float64 as judge
    python -m tests.stacks --seed 7 --only 412         one stack, printed, with every way to compile it

Options are those of `python -m tests.fuzz`, of which this is a level.
"""

from __future__ import annotations

import sys

from tests.fuzz.__main__ import main

if __name__ == "__main__":
    sys.exit(main([*sys.argv[1:], "--level", "stacks"]))
