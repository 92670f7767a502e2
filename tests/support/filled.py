"""An instance of any record in which every field differs from its default, made from the record's types alone."""

import re
from typing import Any

import msgspec
from msgspec import NODEFAULT, inspect

WORDS = ("a-b", "aa", "a/b", "a.b", "a:b", "2026-01-02", "int8", "AA", "model:loss", "https://a.b/c")
"""Words that are tried for a text with a pattern."""


class Filling:
    """Makes values, each different from those before where its type allows."""

    def __init__(self) -> None:
        self._count = 0

    def of(self, kind: inspect.Type, default: object = msgspec.UNSET) -> Any:
        """Return a value of a type that is not `default`."""
        self._count += 1
        match kind:
            case inspect.Metadata():
                return self.of(kind.type, default)
            case inspect.AnyType():
                return {"a": [1, 2.5, "b", None, True]}
            case inspect.BoolType():
                return default is not True
            case inspect.IntType():
                first = kind.ge if kind.ge is not None else 0 if kind.gt is None else kind.gt + 1
                last = kind.le if kind.le is not None else first + 96 if kind.lt is None else kind.lt - 1
                room = min(97, last - first + 1)
                return next(v for i in range(room) if (v := first + (self._count + i) % room) != default)
            case inspect.FloatType():
                least = next((bound for bound in (kind.ge, kind.gt) if bound is not None and bound > 0), 0)
                most = next((bound for bound in (kind.le, kind.lt) if bound is not None), 1e9)
                return min(least + 0.5 + self._count / 1024, (least + most) / 2)
            case inspect.StrType():
                words = [*WORDS, f"word-{self._count}", f"word {self._count}"]
                size = range(kind.min_length or 0, 1 + (kind.max_length or 1 << 30))
                fits = [w for w in words if len(w) in size and re.search(kind.pattern or "", w) and w != default]
                return fits[-1]
            case inspect.BytesType():
                return bytes((self._count + i) % 256 for i in range(max(kind.min_length or 0, 1)))
            case inspect.EnumType():
                return next(v for v in kind.cls if v != default)
            case inspect.LiteralType():
                return next(v for v in kind.values if v != default)
            case inspect.UnionType():
                return self.of(next(t for t in kind.types if not isinstance(t, inspect.NoneType)), default)
            case inspect.VarTupleType() | inspect.ListType():
                return (self.of(kind.item_type),)
            case inspect.TupleType():
                return tuple(self.of(item) for item in kind.item_types)
            case inspect.DictType():
                return {self.of(kind.key_type): self.of(kind.value_type)}
            case inspect.StructType():
                return self.struct(kind)
        raise NotImplementedError(f"a value of {kind}")

    def struct(self, kind: inspect.StructType) -> Any:
        """Return a record with every field filled."""
        return kind.cls(**{field.name: self.of(field.type, default_of(field)) for field in kind.fields})


def default_of(field: inspect.Field) -> object:
    """Return a field's default; `UNSET` if it has none."""
    if field.default_factory is not NODEFAULT:
        return field.default_factory()
    return msgspec.UNSET if field.default is NODEFAULT else field.default


def filled(record: type[msgspec.Struct]) -> Any:
    """Return an instance of a record in which every field differs from its default."""
    kind = inspect.type_info(record)
    assert isinstance(kind, inspect.StructType)
    return Filling().struct(kind)


def least(record: Any) -> Any:
    """Return a record with the fields that have a default set to it."""
    kind = inspect.type_info(type(record))
    assert isinstance(kind, inspect.StructType)
    defaults = {field.name: default_of(field) for field in kind.fields}
    return msgspec.structs.replace(record, **{n: v for n, v in defaults.items() if v is not msgspec.UNSET})
