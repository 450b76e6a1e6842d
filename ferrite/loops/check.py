"""What a loop program satisfies. `check_program` raises `Malformed` with the name of the rule that is broken.

Names
    identifiers     every name is a Python identifier, neither a keyword nor `_`
    unique names    sizes and buffers all have different names, and no axis has the name of one of them
    size bounds     the lower bound of a size is not above the upper one
Buffers
    role            a parameter is "in", "out" or "inout"
    strides         a buffer has one stride for each size
    extents         sizes, strides and extents of loops are made of constants and sizes of the program; sizes of buffers
                    and extents of loops are not negative
    declared        a buffer in use is a parameter or a local of the program: that very one
Writing
    read only       a parameter with the role "in" is not written
    written first   a local or an "out" parameter is read or accumulated into only if an earlier statement wrote it
    written         an "out" parameter that has elements is written
    one element     a store or scan whose value changes along an axis names the axis in its index; a buffer that is
                    written does not lie over itself (a stride of 0 across several elements)
Axes
    bound once      a loop, reduction or scan binds an axis that nothing around it has bound, by name
    bound           an axis in use is bound around its use, with the same extent
    sizes           a size in use is one of the program's: that very one
    nest            a nest has at least one statement
Indices
    normal form     no coefficient is 0, no monomial is empty or repeated, terms stand in their order
    divisor         nothing is divided by the constant 0
    index rank      a load or store has one index for each dimension
    bounds          every index lies inside its dimension; see Note [Bounds]
    data index      an index from data is an integer, and promises no narrower range than `checked` makes sure of
Expressions
    constant        a float in a float dtype, an integer in an integer dtype that can hold it, a bool in b8
    operation       an operation, reduction, scan or accumulation is in its table
    arity           an operation has as many operands as its table says
    one dtype       operands of an operation, branches of a choice, a buffer and what is written to it have one dtype
    kind            an operation, reduction, scan or accumulation takes dtypes of this kind
    condition       a condition is b8
    bits            `bits` goes between dtypes of one width, and not to b8
    checked         what is checked is an integer, and the error of a check is the name of a Python exception
    random          draws are "bits" in i32, "uniform" or "normal" in f32; the seed is i64, the stream is not negative
    reduction       a reduction has at least one axis, and gives the result that is taken
    not empty       a reduction that refuses an empty box, and a fold, never meets one: an associative operation need
                    not have a value to start from
    fold            a fold combines each of its values into its own dtype, by expressions that hold no other fold, that
                    nothing can stop with an error (who is combined with whom is not said) and that read nothing which
                    the scan around them writes
    argument        an argument stands in the combine of a fold, and has the dtype of the value with its number
    scan targets    a scan has one target for each result, and uses at least one; so does one of a fold

Note [Bounds]: without run-time sizes, every index must be proven to lie inside by the bounds of its atoms. With them a
proof may need facts that a program does not carry (s0 is even, s0 is s1 + 2), so an index is refused only if it is
outside for all values that the sizes can have; the oracle finds the rest. The same holds for extents: one that is a
size, or a product of sizes, must be proven; one that is a sum is trusted unless disproven. Trusted as declared: the
value (not the condition) of `guarded` and `require`, loops that never run, and indices from data: anything from `low`
to `high`.

What no rule here proves, and the oracle reports: every element of an "out" parameter is written; two points that store
to one element through an index such as `i // 2` store the same value; no integer is divided by a 0 from data.
"""

from __future__ import annotations

import builtins
import keyword
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NoReturn

from ferrite.errors import Malformed
from ferrite.loops import index as indices
from ferrite.loops.dtypes import DType, b8, i64
from ferrite.loops.index import ONE, ZERO, Axis, Data, FloorDiv, Index, Mod, Size
from ferrite.loops.nodes import (
    Accumulate,
    AnyNode,
    Apply,
    Argument,
    Assert,
    Bits,
    Buffer,
    Cast,
    Checked,
    Const,
    Expr,
    Fold,
    FoldScan,
    Guarded,
    Load,
    Nest,
    Position,
    Program,
    Random,
    Reduce,
    Require,
    Scan,
    Select,
    Statement,
    Store,
)
from ferrite.loops.operations import ACCUMULATIONS, OPERATIONS, REDUCTIONS, SCANS, Reduction
from ferrite.loops.rewrite import can_raise, children, walk
from ferrite.loops.text import RANDOM_DTYPES, show


def check_program(program: Program, where: str) -> None:
    """Raise `Malformed` if the program breaks a rule; `where` names the stage or pass that made it."""
    _Checker(program, where).run()


@dataclass(frozen=True)
class _Scope:
    """Where an expression stands: the axes around it, whether it is known to run or trusted to be in bounds, and the
    dtypes of the values if it is what a fold combines them with."""

    axes: tuple[Axis, ...] = ()
    trusted: bool = False
    folded: tuple[DType, ...] | None = None

    def inside(self, axes: tuple[Axis, ...]) -> _Scope:
        never = any(indices.bounds(axis.extent)[1] == 0 for axis in axes)
        return replace(self, axes=self.axes + axes, trusted=self.trusted or never)

    def guarded(self) -> _Scope:
        return replace(self, trusted=True)

    def combining(self, dtypes: tuple[DType, ...]) -> _Scope:
        return replace(self, folded=dtypes)

    def runs(self) -> bool:
        return all(indices.known_nonnegative(axis.extent - 1) for axis in self.axes)


@dataclass(frozen=True)
class _Found:
    """What is known of a checked expression: its dtype, and the axes that its value depends on."""

    dtype: DType
    axes: frozenset[Axis]


class _Checker:
    """One walk over a program. A shared expression is looked at once for each scope that it stands in."""

    def __init__(self, program: Program, where: str) -> None:
        self._program = program
        self._where = where
        self._spot: AnyNode = program
        self._sizes = {size.name: size for size in program.sizes}
        self._roles = {parameter.buffer: parameter.role for parameter in program.parameters}
        self._buffers = {buffer.name: buffer for buffer in (*self._roles, *program.locals)}
        self._written = {buffer for buffer, role in self._roles.items() if role != "out"}
        self._exprs: dict[tuple[Expr, _Scope], _Found] = {}
        self._indices: dict[tuple[Index, _Scope], frozenset[Axis]] = {}

    def run(self) -> None:
        self._check_declarations()
        for nest in self._program.nests:
            self._check_nest(nest)
        self._spot = self._program
        for buffer, role in self._roles.items():
            if role == "out" and buffer not in self._written and ZERO not in buffer.sizes:
                self._refuse("written", f"nothing writes {buffer.name}")

    def _refuse(self, rule: str, found: str) -> NoReturn:
        raise Malformed(f"{rule}: {found}", where=self._where, program=show(self._spot))

    # ---- declarations

    def _check_declarations(self) -> None:
        program = self._program
        self._check_names([program.name])
        buffers = [*(parameter.buffer for parameter in program.parameters), *program.locals]
        names = [size.name for size in program.sizes] + [buffer.name for buffer in buffers]
        self._check_names(names)
        for name in names:
            if names.count(name) > 1:
                self._refuse("unique names", f"{name} is declared twice")
        for size in program.sizes:
            if size.low is not None and size.high is not None and size.low > size.high:
                self._refuse("size bounds", f"{size.name} lies between {size.low} and {size.high}")
        for parameter in program.parameters:
            if parameter.role not in ("in", "out", "inout"):
                self._refuse("role", f"{parameter.buffer.name} has the role {parameter.role!r}")
        for buffer in buffers:
            self._spot = buffer
            self._check_buffer(buffer)

    def _check_names(self, names: Iterable[str]) -> None:
        for name in names:
            if not name.isidentifier() or keyword.iskeyword(name) or name == "_":
                self._refuse("identifiers", f"{name!r} is no name")

    def _check_buffer(self, buffer: Buffer) -> None:
        if len(buffer.sizes) != len(buffer.strides):
            self._refuse("strides", f"{buffer.name} has {len(buffer.sizes)} sizes and {len(buffer.strides)} strides")
        for size in buffer.sizes:
            self._check_extent(size)
        for stride in buffer.strides:
            self._check_made_of_sizes(stride)

    def _check_extent(self, extent: Index) -> None:
        self._check_made_of_sizes(extent)
        if self._may_be_below(extent, 0):
            self._refuse("extents", f"{extent} may be negative")

    def _check_made_of_sizes(self, value: Index) -> None:
        for atom in indices.free_atoms(value):
            if not isinstance(atom, Size):
                self._refuse("extents", f"{value} depends on {indices.show_atom(atom, show)}")
        self._check_index(value, _Scope())

    def _may_be_below(self, extent: Index, least: int) -> bool:
        """See Note [Bounds]. The interval of a constant or a product of sizes is exact, that of a sum may be wide."""
        low, high = indices.bounds(extent)
        if low is not None and low >= least:
            return False
        exact = not extent.terms or (len(extent.terms) == 1 and not extent.constant and _only_sizes(extent))
        return exact or (high is not None and high < least)

    # ---- statements

    def _check_nest(self, nest: Nest) -> None:
        self._spot = nest
        if not nest.body:
            self._refuse("nest", "there is nothing to do")
        scope = self._bind(nest.axes, _Scope())
        for statement in nest.body:
            self._spot = statement
            self._check_statement(statement, scope)

    def _bind(self, axes: tuple[Axis, ...], scope: _Scope) -> _Scope:
        """The scope inside a loop over `axes`."""
        bound = {axis.name for axis in scope.axes}
        for axis in axes:
            self._check_names([axis.name])
            if axis.name in bound:
                self._refuse("bound once", f"{axis.name} is bound twice")
            if axis.name in self._buffers or axis.name in self._sizes:
                self._refuse("unique names", f"{axis.name} is an axis and something else")
            self._check_extent(axis.extent)
            bound.add(axis.name)
        return scope.inside(axes)

    def _check_statement(self, statement: Statement, scope: _Scope) -> None:
        match statement:
            case Store(buffer=buffer, index=index, value=value):
                self._check_write(buffer, index, self._check_expr(value, scope), scope)
            case Accumulate(operation=operation, buffer=buffer, index=index, value=value):
                found = self._check_expr(value, scope)
                if operation not in ACCUMULATIONS:
                    self._refuse("operation", f"there is no accumulation {operation}")
                self._check_kind(operation, found.dtype, OPERATIONS[operation].kinds)
                self._check_target(buffer, index, found.dtype, scope)
                self._check_read(buffer)
            case Scan():
                self._check_scan(statement, scope)
            case FoldScan():
                self._check_fold_scan(statement, scope)
            case Assert(condition=condition, error=error):
                self._check_condition(condition, scope)
                self._check_error(error)
            case _:
                self._refuse("operation", f"there is no statement {type(statement).__name__}")

    def _check_scan(self, scan: Scan, scope: _Scope) -> None:
        inner = self._bind((scan.axis,), scope)
        found = self._check_expr(scan.value, inner)
        if scan.operation not in SCANS:
            self._refuse("operation", f"there is no scan {scan.operation}")
        row = SCANS[scan.operation]
        self._check_kind(scan.operation, found.dtype, row.kinds)
        if len(scan.targets) != len(row.results) or not any(scan.targets):
            self._refuse("scan targets", f"{scan.operation} gives {_results(row)}")
        # What a scan gives changes along its axis, even if what it takes does not.
        along = frozenset((*found.axes, scan.axis))
        for target, (_, rule) in zip(scan.targets, row.results, strict=True):
            if target is not None:
                self._check_write(*target, _Found(_result_dtype(rule, found.dtype), along), inner)

    def _check_fold_scan(self, scan: FoldScan, scope: _Scope) -> None:
        inner = self._bind((scan.axis,), scope)
        dtypes, axes = self._check_combine(scan, scope, inner)
        if len(scan.targets) != len(scan.values) or not any(scan.targets):
            self._refuse("scan targets", f"a fold of {len(scan.values)} values gives as many results")
        for target, dtype in zip(scan.targets, dtypes, strict=True):
            if target is not None:
                if any(node.buffer is target[0] for e in scan.combine for node in walk(e) if isinstance(node, Load)):
                    self._refuse("fold", f"the combine reads {target[0].name}, which the scan writes")
                self._check_write(*target, _Found(dtype, axes | {scan.axis}), inner)

    def _check_combine(
        self, fold: Fold | FoldScan, scope: _Scope, inner: _Scope
    ) -> tuple[tuple[DType, ...], frozenset[Axis]]:
        """The dtypes of what is folded, and the axes that the values and the combine depend on. The combine stands
        outside of the axes of the fold, in `scope`; the values stand in `inner`."""
        if scope.folded is not None:
            self._refuse("fold", "a fold in the combine of another one")
        found = [self._check_expr(value, inner) for value in fold.values]
        dtypes = tuple(value.dtype for value in found)
        made = [self._check_expr(part, scope.combining(dtypes)) for part in fold.combine]
        if tuple(part.dtype for part in made) != dtypes or not dtypes:
            kinds = (", ".join(map(str, of)) or "nothing" for of in (dtypes, [part.dtype for part in made]))
            self._refuse("fold", "{} is combined into {}".format(*kinds))
        if any(map(can_raise, fold.combine)):
            self._refuse("fold", "the combine can raise")
        return dtypes, frozenset().union(*(part.axes for part in (*found, *made)))

    def _check_write(self, buffer: Buffer, index: tuple[Index, ...], found: _Found, scope: _Scope) -> None:
        """A store: no two points may meet at one element with different values."""
        named = self._check_target(buffer, index, found.dtype, scope)
        for axis in scope.axes:
            steps = indices.bounds(axis.extent)[1]
            if axis in found.axes and axis not in named and (steps is None or steps > 1):
                self._refuse("one element", f"the value changes along {axis.name}, the index does not")
        for size, stride in zip(buffer.sizes, buffer.strides, strict=True):
            if stride is ZERO and ZERO not in buffer.sizes and not indices.known_nonnegative(ONE - size):
                self._refuse("one element", f"{buffer.name} has a stride of 0")
        self._written.add(buffer)

    def _check_target(self, buffer: Buffer, index: tuple[Index, ...], dtype: DType, scope: _Scope) -> frozenset[Axis]:
        named = self._check_place(buffer, index, scope)
        if self._roles.get(buffer) == "in":
            self._refuse("read only", f"{buffer.name} is written")
        if buffer.dtype is not dtype:
            self._refuse("one dtype", f"{buffer.name} holds {buffer.dtype}, the value is {dtype}")
        return named

    def _check_read(self, buffer: Buffer) -> None:
        if buffer not in self._written:
            self._refuse("written first", f"{buffer.name} is read before anything is written to it")

    # ---- expressions

    def _check_expr(self, root: Expr, scope: _Scope) -> _Found:
        """Operands first, without recursion: `_look_at` finds those of its node done."""
        waiting = [(root, scope)]
        while waiting:
            node, around = waiting[-1]
            if (node, around) in self._exprs:
                waiting.pop()
                continue
            open_ones = [inner for inner in self._operands(node, around) if inner not in self._exprs]
            if open_ones:
                waiting += reversed(open_ones)
            else:
                self._exprs[node, around] = self._look_at(node, around)
        return self._exprs[root, scope]

    def _operands(self, node: Expr, scope: _Scope) -> list[tuple[Expr, _Scope]]:
        match node:
            case Reduce(axes=axes, body=body):
                return [(body, self._bind(axes, scope))]
            case Fold(axes=axes, values=values):
                inner = self._bind(axes, scope)
                return [(value, inner) for value in values]
            case Guarded(condition=condition, value=value, otherwise=otherwise):
                return [(condition, scope), (value, scope.guarded()), (otherwise, scope)]
            case Require(condition=condition, value=value):
                return [(condition, scope), (value, scope.guarded())]
        return [(child, scope) for child in children(node) if isinstance(child, Expr)]

    def _look_at(self, node: Expr, scope: _Scope) -> _Found:
        match node:
            case Const():
                self._check_constant(node)
                return _Found(node.kind, frozenset())
            case Load(buffer=buffer, index=index):
                axes = self._check_place(buffer, index, scope)
                self._check_read(buffer)
                return _Found(buffer.dtype, axes)
            case Cast(kind=kind, value=value):
                return _Found(kind, self._check_expr(value, scope).axes)
            case Bits(kind=kind, value=value):
                inner = self._check_expr(value, scope)
                if kind.bits != inner.dtype.bits or kind.is_bool:
                    self._refuse("bits", f"{inner.dtype} as {kind}")
                return _Found(kind, inner.axes)
            case Apply():
                return self._check_apply(node, scope)
            case Select(condition=condition, yes=yes, no=no):
                return self._check_choice(condition, self._check_expr(yes, scope), no, scope)
            case Guarded(condition=condition, value=value, otherwise=otherwise):
                return self._check_choice(condition, self._check_expr(value, scope.guarded()), otherwise, scope)
            case Position(index=position):
                return _Found(i64, self._check_index(position, scope))
            case Checked(value=value, size=size, error=error):
                inner = self._check_expr(value, scope)
                if not inner.dtype.is_int:
                    self._refuse("checked", f"an index of dtype {inner.dtype}")
                self._check_error(error)
                return _Found(i64, inner.axes | self._check_index(size, scope))
            case Require(condition=condition, value=value, error=error):
                self._check_condition(condition, scope)
                self._check_error(error)
                return self._check_expr(value, scope.guarded())
            case Random():
                return self._check_random(node, scope)
            case Reduce():
                return self._check_reduce(node, scope)
            case Fold():
                return self._check_fold(node, scope)
            case Argument():
                return self._check_argument(node, scope)
        self._refuse("operation", f"there is no expression {type(node).__name__}")

    def _check_constant(self, node: Const) -> None:
        kind = node.kind
        if type(node.value) is not {"float": float, "int": int, "bool": bool}[kind.kind]:
            self._refuse("constant", f"{node.value!r} as {kind}")
        if kind.is_int:
            least = -(2 ** (kind.bits - 1)) if kind.signed else 0
            if not least <= node.value < least + 2**kind.bits:
                self._refuse("constant", f"{kind} does not hold {node.value}")

    def _check_apply(self, node: Apply, scope: _Scope) -> _Found:
        operands = [self._check_expr(operand, scope) for operand in node.operands]
        if node.operation not in OPERATIONS:
            self._refuse("operation", f"there is no operation {node.operation}")
        row = OPERATIONS[node.operation]
        if len(operands) != row.arity:
            self._refuse("arity", f"{row.name} takes {row.arity} operands, not {len(operands)}")
        dtype = operands[0].dtype
        for operand in operands:
            self._check_same(row.name, dtype, operand.dtype)
        self._check_kind(row.name, dtype, row.kinds)
        axes = frozenset().union(*(operand.axes for operand in operands))
        return _Found(b8 if row.result == "bool" else dtype, axes)

    def _check_choice(self, condition: Expr, chosen: _Found, other: Expr, scope: _Scope) -> _Found:
        rest = self._check_expr(other, scope)
        self._check_same("a choice", chosen.dtype, rest.dtype)
        return _Found(chosen.dtype, chosen.axes | rest.axes | self._check_condition(condition, scope))

    def _check_condition(self, condition: Expr, scope: _Scope) -> frozenset[Axis]:
        found = self._check_expr(condition, scope)
        if found.dtype is not b8:
            self._refuse("condition", f"a condition of dtype {found.dtype}")
        return found.axes

    def _check_same(self, what: str, first: DType, other: DType) -> None:
        if first is not other:
            self._refuse("one dtype", f"{what} takes one dtype, not {first} and {other}")

    def _check_kind(self, what: str, dtype: DType, kinds: tuple[str, ...]) -> None:
        if dtype.kind not in kinds:
            self._refuse("kind", f"{what} takes {' or '.join(kinds)}, not {dtype}")

    def _check_error(self, error: str) -> None:
        kind = getattr(builtins, error, None)
        if not isinstance(kind, type) or not issubclass(kind, Exception):
            self._refuse("checked", f"{error!r} is no exception")

    def _check_random(self, node: Random, scope: _Scope) -> _Found:
        seed = self._check_expr(node.seed, scope)
        if RANDOM_DTYPES.get(node.draw) is not node.kind:
            self._refuse("random", f"{node.draw!r} in {node.kind}")
        if seed.dtype is not i64:
            self._refuse("random", f"a seed of dtype {seed.dtype}")
        if node.stream < 0:
            self._refuse("random", f"the stream {node.stream}")
        return _Found(node.kind, seed.axes | self._check_index(node.counter, scope))

    def _check_reduce(self, node: Reduce, scope: _Scope) -> _Found:
        if node.operation not in REDUCTIONS:
            self._refuse("operation", f"there is no reduction {node.operation}")
        row = REDUCTIONS[node.operation]
        if not node.axes:
            self._refuse("reduction", f"{row.name} over no axis")
        if node.result not in dict(row.results):
            self._refuse("reduction", f"{row.name} gives {_results(row)}, not {node.result}")
        found = self._check_expr(node.body, self._bind(node.axes, scope))
        self._check_kind(row.name, found.dtype, row.kinds)
        for axis in node.axes:
            if row.empty == "is refused" and self._may_be_below(axis.extent, 1):
                self._refuse("not empty", f"{row.name} over {axis.name}, which may have no steps")
        dtype = _result_dtype(dict(row.results)[node.result], found.dtype)
        return _Found(dtype, found.axes - frozenset(node.axes))

    def _check_fold(self, node: Fold, scope: _Scope) -> _Found:
        if not node.axes:
            self._refuse("reduction", "a fold over no axis")
        dtypes, axes = self._check_combine(node, scope, self._bind(node.axes, scope))
        if not 0 <= node.result < len(dtypes):
            self._refuse("reduction", f"a fold of {len(dtypes)} values has no result {node.result}")
        for axis in node.axes:
            if self._may_be_below(axis.extent, 1):
                self._refuse("not empty", f"a fold over {axis.name}, which may have no steps")
        return _Found(dtypes[node.result], axes - frozenset(node.axes))

    def _check_argument(self, node: Argument, scope: _Scope) -> _Found:
        """It varies as the values do, which the fold sees to."""
        known = scope.folded or ()
        if node.side not in ("left", "right") or not 0 <= node.number < len(known):
            self._refuse("argument", f"{node.side} {node.number} where {len(known)} values are combined")
        if known[node.number] is not node.kind:
            self._refuse("argument", f"{node.side} {node.number} is {known[node.number]}, not {node.kind}")
        return _Found(node.kind, frozenset())

    # ---- indices

    def _check_place(self, buffer: Buffer, index: tuple[Index, ...], scope: _Scope) -> frozenset[Axis]:
        """An element of a buffer; the axes that it depends on."""
        if self._buffers.get(buffer.name) is not buffer:
            self._refuse("declared", f"{buffer.name} is not a buffer of the program")
        if len(index) != len(buffer.sizes):
            self._refuse("index rank", f"{len(index)} indices for {buffer.name} of {len(buffer.sizes)} dimensions")
        axes = frozenset().union(*(self._check_index(part, scope) for part in index))
        if not scope.trusted:
            for part, size in zip(index, buffer.sizes, strict=True):
                if not (_may_hold(part, scope) and _may_hold(size - 1 - part, scope)):
                    self._refuse("bounds", f"{show(part)} in a dimension of {size}")
        return axes

    def _check_index(self, value: Index, scope: _Scope) -> frozenset[Axis]:
        """The axes that an index depends on, those of the data in it included."""
        found = self._indices.get((value, scope))
        if found is None:
            if not indices.in_order(value):
                self._refuse("normal form", f"{show(value)} is not what arithmetic gives")
            found = frozenset().union(*(self._check_atom(atom, scope) for atom in indices.atoms(value)))
            self._indices[value, scope] = found
        return found

    def _check_atom(self, atom: indices.Atom, scope: _Scope) -> frozenset[Axis]:
        match atom:
            case Axis(name=name):
                if atom not in scope.axes:
                    self._refuse("bound", f"no loop around it binds {name} up to {atom.extent}")
                return frozenset((atom,))
            case Size(name=name):
                if self._sizes.get(name) is not atom:
                    self._refuse("sizes", f"{name} is not a size of the program")
                return frozenset()
            case Data():
                return self._check_data(atom, scope)
            case FloorDiv(divisor=divisor) | Mod(divisor=divisor) if divisor is ZERO:
                self._refuse("divisor", f"{indices.show_atom(atom, show)} divides by 0")
        return frozenset().union(*(self._check_index(part, scope) for part in indices.parts(atom)))

    def _check_data(self, atom: Data, scope: _Scope) -> frozenset[Axis]:
        found = self._check_expr(atom.value, scope)
        if not found.dtype.is_int:
            self._refuse("data index", f"an index of dtype {found.dtype}")
        if isinstance(atom.value, Checked):
            last = atom.value.size - 1
            if not (_may_hold(-atom.low, scope) and _may_hold(atom.high - last, scope)):
                self._refuse("data index", f"{show(indices.of_atom(atom))} promises more than it checks")
        return found.axes | self._check_index(atom.low, scope) | self._check_index(atom.high, scope)


def _result_dtype(rule: str, same: DType) -> DType:
    return {"same": same, "i64": i64, "b8": b8}[rule]


def _results(row: Reduction) -> str:
    return " and ".join(name for name, _ in row.results)


def _only_sizes(value: Index) -> bool:
    return all(isinstance(atom, Size) for atom in indices.atoms(value))


# ---- Note [Bounds]


def _may_hold(claim: Index, scope: _Scope) -> bool:
    """Whether to accept that `claim` is never negative: proven, or about run-time sizes and not disproven."""
    if indices.known_nonnegative(claim):
        return True
    claim = _data_as_axes(claim)
    if indices.known_nonnegative(claim):
        return True
    return _mentions_size(claim) and not (scope.runs() and _is_disproven(claim))


def _data_as_axes(claim: Index) -> Index:
    """Data from `low` to `high` is `low` plus a loop variable of its own: the rest of the algebra knows those."""
    while found := [atom for atom in indices.free_atoms(claim) if isinstance(atom, Data)]:
        ordered = sorted(found, key=lambda atom: indices.show_atom(atom, show))
        fresh: dict[indices.Atom, Index] = {
            atom: atom.low + indices.axis(f"{count} from data", atom.high - atom.low + 1)
            for count, atom in enumerate(ordered)
        }
        claim = indices.substitute(claim, fresh)
    return claim


def _mentions_size(claim: Index) -> bool:
    for atom in indices.free_atoms(claim):
        if isinstance(atom, Size) or (isinstance(atom, Axis) and _mentions_size(atom.extent)):
            return True
    return False


def _is_disproven(claim: Index) -> bool:
    """Whether the claim is negative, for all sizes, at the point of the loops where it is least or near."""
    for axis in sorted(indices.free_axes(claim), key=lambda axis: axis.name):
        step = indices.coefficient_of(claim, axis)
        falls = step is not None and indices.known_nonnegative(-step)
        claim = indices.substitute(claim, {axis: axis.extent - 1 if falls else ZERO})
    high = indices.bounds(claim)[1]
    return high is not None and high < 0
