"""`python -m ferrite`: the same as the command `ferrite`."""

from __future__ import annotations

import sys

from ferrite.command import main

sys.exit(main())
