"""Compiled graphs among the artifacts that PyTorch carries from one cache to another:

    data, _ = torch.compiler.save_cache_artifacts()     # after a first call
    torch.compiler.load_cache_artifacts(data)           # in another process, or on another machine

PyTorch gives up on all of them if one is of a kind that it does not know, so `import ferrite` loads this module where
torch is loaded. What it takes to write them down is loaded when there are some.
"""

from __future__ import annotations

from torch.compiler._cache import CacheArtifact, CacheArtifactFactory


@CacheArtifactFactory.register
class GraphArtifact(CacheArtifact):
    """One entry with its machine code, as `artifact.entry.bundle` writes it."""

    @staticmethod
    def type() -> str:
        return "ferrite"

    def populate_cache(self) -> None:
        from ferrite.caching import put

        put(self.content)
