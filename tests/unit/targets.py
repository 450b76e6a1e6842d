"""The instruction sets that tests make code for and run here.

Note [Vectors of 64 bytes without AVX-512]
    `Wide` writes code as for AVX-512: vectors of 64 bytes, masks for elements of every width, gathers and scatters.
    LLVM takes it apart for AVX2, so that what the emitter writes for 16 lanes runs on machines that have 8. Only the
    three instructions that exist nowhere else (`Builder.has_scalef`) stay out; a machine that has them runs AVX-512
    itself.
"""

from __future__ import annotations

from dataclasses import fields

from ferrite.native.target import Target, host, named, runs_here


class Wide(Target):
    """See Note [Vectors of 64 bytes without AVX-512]."""

    def has_masked(self, bits: int) -> bool:
        return True


def _wide(like: Target) -> Target:
    given = {each.name: getattr(like, each.name) for each in fields(like)}
    return Wide(**given | {"name": "wide", "vector_bytes": 64, "fast_gather": True})


def _targets() -> tuple[Target, ...]:
    able = [named(name) for name in ("x86-64-v3", "x86-64") if runs_here(named(name))]
    others = [each for each in able if each.vector_bytes != host().vector_bytes]
    return (host(), *others, *(_wide(each) for each in able if each.has_avx2))


TARGETS = _targets()  # what ships from here first, then the rest
