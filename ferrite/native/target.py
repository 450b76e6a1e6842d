"""What a processor can do, as far as code for it depends on that.

A `Target` is made from CPU features: of this machine (`host`), or of a named level (`named`), so that code for every
instruction set can be made, read and, where the machine has the instructions, run in one place. Everything that writes
native code asks the target and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import llvmlite
import llvmlite.binding as llvm

if TYPE_CHECKING:
    from ferrite.loops.dtypes import DType

# AVX-512 as every server core has had it since 2017: without one of these it is not used at all.
AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd")


@dataclass(frozen=True, slots=True)
class Target:
    """`features` is LLVM's text, "+avx2,-avx512f,..."; empty means what the cpu implies."""

    name: str
    triple: str
    cpu: str
    features: str
    vector_bytes: int
    has_avx512: bool
    has_avx2: bool
    has_fma: bool
    has_f16c: bool  # converts f16 to f32 and back in one instruction
    has_sse41: bool  # rounds in one instruction and blends
    fast_gather: bool  # one instruction gathers or scatters 32 and 64 bit elements, under a mask

    @property
    def is_x86(self) -> bool:
        return self.triple.startswith("x86_64")

    @property
    def has_rounding(self) -> bool:
        """floor, ceil, trunc and roundeven are instructions; elsewhere LLVM would call libm for each lane."""
        return self.has_sse41 or not self.is_x86

    def lanes(self, dtype: DType) -> int:
        """How many elements the widest vector holds."""
        return self.vector_bytes // dtype.bytes

    def has_masked(self, bits: int) -> bool:
        """Whether a masked load or store of elements of this width is one instruction."""
        return self.has_avx512 or (self.has_avx2 and bits >= 32)

    @property
    def function_attributes(self) -> str:
        """Without these some AVX-512 cpus of LLVM split vectors of 512 bits in two."""
        if self.has_avx512:
            return '"prefer-vector-width"="512" "min-legal-vector-width"="512"'
        return ""


@cache
def host() -> Target:
    """This machine."""
    start_llvm()
    features = llvm.get_host_cpu_features()
    return _target("host", llvm.get_default_triple(), llvm.get_host_cpu_name(), features.flatten(), dict(features))


@cache
def named(name: str) -> Target:
    """ "host", "x86-64-v4" (AVX-512), "x86-64-v3" (AVX2 and FMA), "x86-64" (SSE2) or "aarch64" (NEON)."""
    if name == "host":
        return host()
    linux = "x86_64-unknown-linux-gnu"
    sse41 = dict.fromkeys(("sse4.1",), True)
    avx2 = sse41 | dict.fromkeys(("avx2", "fma", "f16c"), True)
    match name:
        case "x86-64-v4":
            return _target(name, linux, name, "", avx2 | dict.fromkeys(AVX512, True))
        case "x86-64-v3":
            return _target(name, linux, name, "", avx2)
        case "x86-64":
            return _target(name, linux, name, "", {})
        case "aarch64":
            return _target(name, "aarch64-unknown-linux-gnu", "generic", "+neon", {"fma": True, "f16c": True})
    raise ValueError(f"no target is named {name!r}")


def runs_here(target: Target) -> bool:
    """Whether this machine has the instructions of the target."""
    here = host()
    return (
        target.is_x86 == here.is_x86
        and (here.has_avx512 or not target.has_avx512)
        and (here.has_avx2 or not target.has_avx2)
        and (here.has_fma or not target.has_fma)
    )


@cache
def llvm_version() -> str:
    return f"llvmlite {llvmlite.__version__}, LLVM {'.'.join(map(str, llvm.llvm_version_info))}"


@cache
def start_llvm() -> None:
    """Makes all of LLVM's targets known. Once."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


def _target(name: str, triple: str, cpu: str, features: str, has: dict[str, bool]) -> Target:
    avx2 = has.get("avx2", False) and has.get("fma", False)
    avx512 = avx2 and all(has.get(feature, False) for feature in AVX512)
    return Target(
        name=name,
        triple=triple,
        cpu=cpu,
        features=features,
        vector_bytes=64 if avx512 else 32 if avx2 else 16,
        has_avx512=avx512,
        has_avx2=avx2,
        has_fma=has.get("fma", False) if avx2 or not triple.startswith("x86_64") else False,
        has_f16c=has.get("f16c", False),
        has_sse41=has.get("sse4.1", False),
        fast_gather=avx512,
    )
