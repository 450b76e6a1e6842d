"""Whatever changes the code that is made changes the key, and what is said to change nothing does not: every option,
and every pass of every stage left out in turn."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.nn import functional

from ferrite import caching
from ferrite.artifact import key
from ferrite.artifact.entry import decode
from ferrite.artifact.store import GRAPHS, OBJECTS, Store
from ferrite.graph.joint import JOINT
from ferrite.graph.post_grad import MUTATE, POST_GRAD, PREPARE
from ferrite.graph.pre_grad.plan import plan
from ferrite.loops.passes import LOOP_PASSES
from ferrite.native import NATIVE_PASSES, perf_map
from ferrite.schedule import SCHEDULE_PASSES
from tests.cache.test_key import CHANGE_NOTHING, CHANGE_THE_KEY

pytestmark = pytest.mark.long

FIRST, LAST = plan(())
STAGES = {
    "pre_grad": (*FIRST, *LAST),
    "joint": JOINT,
    "post_grad": (*PREPARE, *POST_GRAD, *MUTATE),
    "loops": LOOP_PASSES,
    "schedule": SCHEDULE_PASSES,
    "native": NATIVE_PASSES,
}
LEFT_OUT = [f"{stage}.{run.__name__}" for stage, passes in STAGES.items() for run in dict.fromkeys(passes)]


class Halves:
    """A partitioner; what it does is min-cut's, so only its name is new."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return min_cut_rematerialization_partition(*args, **kwargs)

    def uuid(self) -> str:
        return "halves"


# As in `test_key`, but with values under which this is compiled, and to another end than by default.
VALUES = CHANGE_THE_KEY | {
    "partitioner": Halves(),
    "decompose": ("aten.softplus",),
    "disable": ("schedule",),
    "pre_grad": ["normalise_ops"],
    "pre_dispatch_add": ["merge_cats"],
    "pre_dispatch_remove": ["remove_noops"],
}
VARIANTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    **{name: {name: value} for name, value in (VALUES | CHANGE_NOTHING).items() if name != "cache_dir"},
    **{f"without {name}": {"disable": (name,)} for name in LEFT_OUT},
}
# Without these the function below becomes something else: what is compared is not always the same.
MATTER = frozenset({
    "pre_grad.drop_idle_dropout", "pre_grad.merge_cats", "loops.drop_identity",
    "loops.fold_constants", "schedule.fuse", "schedule.keep_exponentials", "schedule.reuse_memory",
})  # fmt: skip


def busy(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A little of everything that passes look for."""
    first, second, third = torch.split(x, [2, 2, 4], 1)
    joined = torch.cat([torch.cat([first, second], 1), torch.cat([third.relu(), third[:, :0]], 1)], dim=1)
    y = functional.layer_norm(functional.linear(joined, w, bias=b), (8,)) * 1
    y = functional.dropout(functional.gelu(y), 0.5, training=False)
    z = y.permute(1, 0).transpose(0, 1).view(2, 3, 8).softmax(-1).exp().sum(1)
    picked = torch.where(n > 2, x.tanh()[n % 3, :1].sum(1), functional.softplus(x[0, 0]))
    noise = functional.dropout(y.sigmoid(), 0.25, training=True)
    return z, picked, noise.std(0), y.amax(1, keepdim=True) + y


@pytest.fixture(autouse=True)
def own_folder_for_perf(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perf_map, "FOLDER", str(tmp_path_factory.mktemp("perf")))


def small(training: bool) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    x, w = torch.randn(6, 8, generator=generator), torch.randn(8, 8, generator=generator)
    return x, w.requires_grad_(training), torch.ones(8).requires_grad_(training), torch.arange(6)


def made(folder: Path, training: bool, **options: Any) -> tuple[str, Any]:
    """The key of the function, and the code that it becomes: host programs, kernels, machine code."""
    chosen = {"cache": "on", "cache_dir": str(folder), **options}
    torch._dynamo.reset()
    with torch.set_grad_enabled(training):
        results = torch.compile(busy, backend="ferrite", fullgraph=True, options=chosen)(*small(training))
    if training:
        sum(result.sum() for result in results).backward()
    told = caching.latest()
    assert told is not None
    assert told.outcome == "miss", told.reason
    store = Store(folder, writable=False)
    data = store.read(GRAPHS, f"{told.key}-0")
    assert data is not None, told.reason
    entry = decode(data, lambda name: store.read(OBJECTS, name))
    code = {
        phase: (part.program, part.kernels, part.code and part.code.objects) for phase, part in entry.graphs.items()
    }
    return told.key, code


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_other_code_has_another_key(tmp_path: Path, training: bool) -> None:
    # What passes before autograd and those over loops do is seen without gradients.
    skipped = ("without pre_grad.", "without loops.") if training else ()
    chosen = {name: settings for name, settings in VARIANTS.items() if not name.startswith(skipped)}
    found = {
        name: made(tmp_path / str(place), training, **settings) for place, (name, settings) in enumerate(chosen.items())
    }
    plain_key, plain_code = found["nothing"]
    others = {name for name, (_, its_code) in found.items() if its_code != plain_code}
    assert [name for name in others if found[name][0] == plain_key] == []
    assert {name for name in CHANGE_NOTHING if found.get(name, found["nothing"]) != found["nothing"]} == set()
    if not training:
        assert {f"without {name}" for name in MATTER} <= others, sorted(others)
    assert {"executor", "fallback_random"} <= others


def test_the_same_twice(tmp_path: Path) -> None:
    assert made(tmp_path / "one", True) == made(tmp_path / "other", True)


def test_a_byte_in_any_source_changes_the_digest(tmp_path: Path) -> None:
    package = tmp_path / "ferrite"
    shutil.copytree(Path(key.__file__).parents[1], package, ignore=shutil.ignore_patterns("__pycache__"))
    whole = key.digest_of_sources(package)
    assert whole == key.source_digest()
    for path in sorted(package.rglob("*.py")):
        before = path.read_bytes()
        path.write_bytes(before + b"#")
        assert key.digest_of_sources(package) != whole, path
        path.write_bytes(before)
    path.rename(path.with_name("renamed.py"))
    assert key.digest_of_sources(package) != whole
