"""No address is read before somebody has looked at what stands behind it: the table of `kinds_of_tensors.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.behaviour.child import run_python
from tests.behaviour.kinds_of_tensors import FITS, GONE, KINDS, WAYS

GROUPS = (
    ("compiled",),
    ("behind guards", "in python", "without code", "in a body", "changing sizes"),
    ("by hand", "cached", "backward"),
)
# AOTAutograd itself wants the tangents of plain results to be of plain classes.
REFUSED = {("backward", "parameter"), ("backward", "subclass without dispatch")}


def test_all_ways_are_in_a_group() -> None:
    assert {way for group in GROUPS for way in group} == WAYS.keys()


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group[0])
def test_kinds_of_tensors(group: tuple[str, ...], tmp_path: Path) -> None:
    """Each cell ends as eager does, or raises; nothing is read that is not there, and no other answer is given."""
    code = "import sys; from tests.behaviour.kinds_of_tensors import main\nfor way in sys.argv[1:]: main(way)"
    child = run_python(code, *group, environment={"KINDS_CACHE": str(tmp_path)}, wait=False)
    output, errors = child.process.communicate(timeout=300)
    lines = output.splitlines()
    assert child.process.returncode == 0, f"{lines[-1:]} {errors[-2000:]}"
    verdicts = [line.removeprefix("end ").split(": ", 2) for line in lines if line.startswith("end ")]
    assert [(way, kind) for way, kind, _ in verdicts] == [(way, kind) for way in group for kind in KINDS]
    for way, kind, verdict in verdicts:
        must_fit = kind in FITS and (way, kind) not in REFUSED
        is_good = verdict == "right" or (verdict.startswith("refused: ") and not must_fit)
        assert is_good, f"{way}: {kind}: {verdict}"
        assert verdict == "right" or kind not in GONE, f"{way}: {kind}: {verdict}"
