"""Frozen values for the verifier, without the cost of making their classes.

A dataclass is written as source and compiled when its module is imported: for some thirty of them that is a
quarter of the time in which `unlearnd verify` has its verdict. Here one constructor serves all.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self, dataclass_transform


@dataclass_transform(frozen_default=True)
class Value:
    """Fields are what a subclass annotates, in order; they are given once, by place or by name."""

    _fields: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._fields = (*cls._fields, *cls.__annotations__)

    def __init__(self, *given: Any, **named: Any) -> None:
        fields = type(self)._fields
        values = dict(zip(fields, given, strict=False))
        if len(given) > len(fields) or named.keys() & values.keys() or not named.keys() <= set(fields):
            raise TypeError(f"{type(self).__name__} takes {', '.join(fields)}")
        values |= named
        for name in fields:
            if name not in values and not hasattr(type(self), name):
                raise TypeError(f"{type(self).__name__} lacks {name}")
        self.__dict__.update(values)

    def but(self, **changed: Any) -> Self:
        """Return the same value with some fields changed."""
        return type(self)(**{**self.__dict__, **changed})

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} cannot be changed")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} cannot be changed")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._content() == other._content()

    def __hash__(self) -> int:
        return hash((type(self), self._content()))

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._fields)
        return f"{type(self).__name__}({shown})"

    def _content(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self._fields)
