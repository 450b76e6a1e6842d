"""Writes LLVM IR as text: instructions, functions, constants and globals. The bottom of `Builder`.

Text is appended line by line, because that is the fastest way into LLVM. Names of values are plain numbers, which LLVM
wants in the order of the text; blocks and stack slots have words, so they may be put in later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias, overload

from ferrite.errors import Malformed
from ferrite.loops.dtypes import DType
from ferrite.native.builder.values import Type, Value, mangled, number_text, pointer, scalar, vector, wrapped
from ferrite.native.target import Target

Operand: TypeAlias = "Value | int | float"
Names: TypeAlias = "tuple[str, ...]"


class _Function:
    """The text of the function that is being written."""

    def __init__(self, header: str) -> None:
        self.header = header
        self.slots: list[str] = []  # stack memory, at the top of the entry block
        self.lines: list[str] = []
        self.values = 0
        self.blocks = 0
        self.splats: dict[tuple[str | None, Type, int, Names], Value] = {}
        self.block: str | None = "entry"  # None: the last block has ended and nothing can be reached


class Writer:
    def __init__(self, target: Target) -> None:
        self.target = target
        self.externals: dict[str, str] = {}  # functions that somebody else has: name -> declaration
        self._globals: dict[str, str] = {}
        self._functions: dict[str, str] = {}  # finished
        self._current: _Function | None = None
        self._lines: list[str] = []
        self._integers: dict[tuple[Type, bool | int | float], Value] = {}  # constants, which addresses are full of

    # ---- the module

    def text(self) -> str:
        """All that was written, as one module."""
        attributes = f"attributes #0 = {{ nounwind {self.target.function_attributes} }}"
        weights = '!0 = !{!"branch_weights", i32 1, i32 4000}\n!1 = !{}\n!2 = !{i32 1}'
        parts = [*self._globals.values(), *self.externals.values(), *self._functions.values(), attributes, weights]
        return "\n".join(parts) + "\n"

    def table(self, dtype: DType, numbers: Sequence[int | float]) -> Value:
        """A pointer to constants in memory. Equal tables are one."""
        element = scalar(dtype)
        inside = ", ".join(f"{element.element} {number_text(dtype, number)}" for number in numbers)
        content = f"[{len(numbers)} x {element.element}] [{inside}]"
        name = self._globals.setdefault(content, f"@table{len(self._globals)} = private constant {content}, align 64")
        return Value(scalar(pointer), (name.split(" ", 1)[0],))

    def record(self, name: str, parts: Sequence[Value]) -> None:
        """Numbers and addresses in memory, one after the other, under a name that is known outside."""
        types = ", ".join(part.type.text for part in parts)
        inside = ", ".join(f"{part.type.text} {part.names[0]}" for part in parts)
        self._globals[name] = f"@{name} = constant {{ {types} }} {{ {inside} }}, align 8"

    def external(self, name: str, result: Type | None, parameters: Sequence[Type], attributes: str = "") -> str:
        """Declares a function that is found by name when the code is loaded. Gives the name to call it by."""
        text = result.text if result is not None else "void"
        inside = ", ".join(parameter.text for parameter in parameters)
        self.externals.setdefault(name, f"declare {text} @{name}({inside}) nounwind {attributes}")
        return f"@{name}"

    # ---- functions

    @contextmanager
    def function(
        self,
        name: str,
        parameters: Mapping[str, DType | Type],
        result: DType | Type | None = None,
        *,
        internal: bool = False,
        attributes: str = "",
        noalias: Sequence[str] = (),
    ) -> Iterator[tuple[Value, ...]]:
        """Writes a function; gives its parameters as values. One may be written while another one is open.

        `internal` ones are for this module only; `attributes` are LLVM's words for it; `noalias` names the pointers to
        memory that no other pointer reaches. Falling off the end returns, if there is no result.
        """
        types = {key: as_type(dtype) for key, dtype in parameters.items()}
        arguments = ", ".join(
            f"{type.text}{' noalias' if key in noalias else ''} %{key}" for key, type in types.items()
        )
        returned = as_type(result).text if result is not None else "void"
        kind = "define internal" if internal else "define"
        outside = self._current
        self._current = _Function(f"{kind} {returned} @{name}({arguments}) {attributes} #0 {{")
        self._lines = self._current.lines
        try:
            yield tuple(Value(type, (f"%{key}",)) for key, type in types.items())
            self._finish(name, self._current)
        finally:
            self._current = outside
            self._lines = outside.lines if outside is not None else []

    def _finish(self, name: str, function: _Function) -> None:
        if function.block is not None:
            if not function.header.split("(", 1)[0].startswith(("define void", "define internal void")):
                raise Malformed(f"the function {name} ends without a result", where="native builder")
            self._lines.append("  ret void")
        if name in self._functions:
            raise Malformed(f"two functions are named {name}", where="native builder")
        body = ["entry:", *function.slots, *function.lines]
        self._functions[name] = "\n".join([function.header, *body, "}"])

    def has_function(self, name: str) -> bool:
        return name in self._functions

    def ret(self, value: Value | None = None) -> None:
        """Leaves the function."""
        self._lines.append("  ret void" if value is None else f"  ret {value.type.text} {value.names[0]}")
        self._function.block = None

    @overload
    def call(self, function: str, result: None, *arguments: Value) -> None: ...

    @overload
    def call(self, function: str, result: Type, *arguments: Value) -> Value: ...

    def call(self, function: str, result: Type | None, *arguments: Value) -> Value | None:
        """Calls a function of this module or an external one, `@name`, once. Arguments have one way."""
        inside = ", ".join(f"{argument.type.text} {argument.names[0]}" for argument in arguments)
        if result is None:
            self._lines.append(f"  call void {function}({inside})")
            return None
        return Value(result, (self._line(f"call {result.text} {function}({inside})"),))

    def slot(self, type: Type, count: int = 1) -> Value:
        """Stack memory for `count` values of a type, aligned to 64 bytes; bools take a byte."""
        function = self._function
        name = f"%slot{len(function.slots)}"
        element = "i8" if type.element == "i1" else type.element
        function.slots.append(f"  {name} = alloca [{type.lanes * count} x {element}], align 64")
        return Value(scalar(pointer), (name,))

    # ---- blocks

    @property
    def _function(self) -> _Function:
        if self._current is None:
            raise Malformed("an instruction outside of a function", where="native builder")
        return self._current

    @property
    def reachable(self) -> bool:
        """Whether what is written now can run: not after `ret`."""
        return self._function.block is not None

    def _new_label(self) -> str:
        self._function.blocks += 1
        return f"b{self._function.blocks}"

    def _start_block(self, label: str) -> None:
        self._lines.append(f"{label}:")
        self._function.block = label

    def _jump(self, label: str) -> None:
        if self._function.block is not None:
            self._lines.append(f"  br label %{label}")
            self._function.block = None

    def _branch(self, condition: Value, yes: str, no: str, *, unlikely: bool = False) -> None:
        weights = ", !prof !0" if unlikely else ""
        self._lines.append(f"  br i1 {condition.names[0]}, label %{yes}, label %{no}{weights}")
        self._function.block = None

    # ---- instructions

    def _line(self, text: str) -> str:
        """One instruction with a result."""
        function = self._current
        assert function is not None
        name = f"%{function.values}"
        function.values += 1
        self._lines.append(f"  {name} = {text}")
        return name

    def _void(self, text: str) -> None:
        """One instruction without a result."""
        self._lines.append(f"  {text}")

    def _unary(self, before: str, a: Value, result: Type, after: str = "") -> Value:
        return Value(result, tuple([self._line(f"{before} {a.type.text} {name}{after}") for name in a.names]))

    def _binary(self, word: str, a: Value, b: Value, result: Type | None = None) -> Value:
        start = f"{word} {a.type.text} "
        left, right = a.names, b.names
        if len(left) != len(right):
            left, right = _equal_ways(left, right)
        line = self._line
        names = [line(f"{start}{x}, {y}") for x, y in zip(left, right, strict=True)]
        return Value(result or a.type, tuple(names))

    def _intrinsic(self, name: str, result: Type, *operands: Value, after: str = "") -> Value:
        """A call of @llvm.<name>.<type of the first operand>, for each way; `after` is more arguments."""
        start = f"call {result.text} @llvm.{name}.{operands[0].type.mangled}("
        arguments = [tuple([f"{each.type.text} {operand}" for operand in each.names]) for each in operands]
        ways = zip(*_equal_ways(*arguments), strict=True)
        return Value(result, tuple([self._line(f"{start}{', '.join(way)}{after})") for way in ways]))

    # ---- constants, and operands brought to one shape

    def constant(self, dtype: DType, number: bool | int | float, lanes: int = 1) -> Value:
        """The same number in all lanes."""
        type = vector(dtype, lanes)
        if not dtype.is_int:
            return _number(type, number)
        found = self._integers.get((type, number))
        if found is None:
            found = self._integers[type, number] = _number(type, wrapped(dtype, int(number)))
        return found

    def like(self, value: Value, number: bool | int | float) -> Value:
        """A constant of the type of a value."""
        return self.constant(value.type.dtype, number, value.type.lanes)

    def lane_numbers(self, dtype: DType, lanes: int, ways: int = 1, step: int = 1) -> Value:
        """0, step, 2 * step, ... over all lanes of all ways."""
        type = vector(dtype, lanes)
        if lanes == 1:
            return Value(type, tuple([number_text(dtype, way * step) for way in range(ways)]))
        names = []
        for way in range(ways):
            numbers = (number_text(dtype, (way * lanes + lane) * step) for lane in range(lanes))
            names.append(f"<{', '.join(f'{type.element} {number}' for number in numbers)}>")
        return Value(type, tuple(names))

    def splat(self, value: Value, lanes: int) -> Value:
        """A scalar in every lane."""
        if value.type.lanes == lanes:
            return value
        if value.literal is not None:
            return self.constant(value.type.dtype, value.literal, lanes)
        # Kept until the block ends: what is written after it need not come by here.
        key = (self._function.block, value.type, lanes, value.names)
        made = self._function.splats.get(key)
        if made is None:
            made = self._function.splats[key] = self._spread_over(value, lanes)
        return made

    def _spread_over(self, value: Value, lanes: int) -> Value:
        type = vector(value.type.dtype, lanes)
        names = []
        for name in value.names:
            one = self._line(f"insertelement {type.text} poison, {type.element} {name}, i32 0")
            names.append(
                self._line(f"shufflevector {type.text} {one}, {type.text} poison, <{lanes} x i32> zeroinitializer")
            )
        return Value(type, tuple(names))

    def join_ways(self, values: Sequence[Value]) -> Value:
        """The ways of several values of one type, as one value."""
        return Value(values[0].type, tuple(name for value in values for name in value.names))

    def with_ways(self, a: Value, ways: int) -> Value:
        """The same value in so many ways."""
        return Value(a.type, a.names * ways, a.literal) if a.ways == 1 else a

    def match(self, *operands: Operand) -> list[Value]:
        """Operands as values of one type: numbers become constants, scalars are spread over the lanes."""
        values = [operand for operand in operands if isinstance(operand, Value)]
        first = values[0].type
        lanes = first.lanes
        same = len(values) == len(operands)
        for value in values:
            if value.type is not first:
                same = False
                lanes = max(lanes, value.type.lanes)
        if same:
            return values
        matched = []
        for operand in operands:
            if not isinstance(operand, Value):
                operand = self.constant(first.dtype, operand, lanes)
            elif operand.type.dtype is not first.dtype:
                types = ", ".join(repr(value.type) for value in values)
                raise Malformed(f"operands of different types: {types}", where="native builder")
            elif operand.type.lanes != lanes:
                if operand.type.lanes != 1:
                    raise Malformed(f"{operand.type.lanes} and {lanes} lanes", where="native builder")
                operand = self.splat(operand, lanes)
            matched.append(operand)
        return matched

    def _shuffle(self, a: Value, b: Value | None, order: Sequence[int]) -> Value:
        """Lanes of a, then of b, in a new order; -1 for a lane that nobody reads."""
        type = vector(a.type.dtype, len(order))
        mask = ", ".join([f"i32 {lane}" if lane >= 0 else "i32 poison" for lane in order])
        text = a.type.text
        second: Names = ("poison",) if b is None else b.names
        names = []
        for x, y in zip(*_equal_ways(a.names, second), strict=True):
            names.append(self._line(f"shufflevector {text} {x}, {text} {y}, <{len(order)} x i32> <{mask}>"))
        return Value(type, tuple(names))

    def extract(self, value: Value, lane: int) -> Value:
        """One lane, as a scalar with the ways of the value."""
        if value.type.lanes == 1 or value.literal is not None:
            return self.constant(value.dtype, value.literal) if value.literal is not None else value
        text = value.type.text
        names = [self._line(f"extractelement {text} {name}, i32 {lane}") for name in value.names]
        return Value(scalar(value.type.dtype), tuple(names))

    def gathered(self, lanes: Sequence[Value]) -> Value:
        """A vector of these scalars, each with one way."""
        type = vector(lanes[0].type.dtype, len(lanes))
        name = "poison"
        for lane, value in enumerate(lanes):
            name = self._line(f"insertelement {type.text} {name}, {type.element} {value.names[0]}, i32 {lane}")
        return Value(type, (name,))

    def extract_at(self, value: Value, lane: Value) -> Value:
        """The lane with this number, known only at run time, of a value with one way."""
        text = f"extractelement {value.type.text} {value.names[0]}, {lane.type.text} {lane.names[0]}"
        return Value(scalar(value.type.dtype), (self._line(text),))

    # ---- pointers

    def advance(self, base: Value, dtype: DType, offset: Value | int) -> Value:
        """The address of an element, counted from a pointer. Vectors of offsets give vectors of pointers."""
        if not isinstance(offset, Value):
            if offset == 0:
                return base
            text = f"getelementptr {memory_element(dtype)}, ptr {base.names[0]}, i64 {offset}"
            return Value(base.type, (self._line(text),))
        if offset.literal == 0 and offset.lanes == 1:
            return base
        start = f"getelementptr {memory_element(dtype)}, ptr {base.names[0]}, {offset.type.text} "
        names = [self._line(start + name) for name in offset.names]
        return Value(vector(pointer, offset.type.lanes), tuple(names))


def _number(type: Type, number: bool | int | float) -> Value:
    text = number_text(type.dtype, number)
    return Value(type, (text if type.lanes == 1 else f"splat ({type.element} {text})",), number)


def as_type(dtype: DType | Type) -> Type:
    return dtype if isinstance(dtype, Type) else scalar(dtype)


def memory_element(dtype: DType) -> str:
    """LLVM's word for an element in memory: bools are bytes there."""
    element = scalar(dtype).element
    return "i8" if element == "i1" else element


def memory_type(dtype: DType, lanes: int) -> tuple[str, str]:
    """LLVM's word for a vector in memory, and its part of the name of an intrinsic."""
    element = memory_element(dtype)
    return (element if lanes == 1 else f"<{lanes} x {element}>"), mangled(element, lanes)


def spread(*values: Value) -> Sequence[Names]:
    """The names of all values, as many for each: a value with one way is the same in all ways."""
    return _equal_ways(*[value.names for value in values])


def _equal_ways(*names: Names) -> Sequence[Names]:
    lengths = [len(each) for each in names]
    ways = max(lengths)
    if ways == min(lengths):
        return names
    if any(length not in (1, ways) for length in lengths):
        raise Malformed(f"values of {lengths} ways", where="native builder")
    return [each if len(each) == ways else each * ways for each in names]
