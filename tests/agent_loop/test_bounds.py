"""Bounds in annotations are checked by the constructor."""

from dataclasses import replace
from typing import Annotated, Literal

import pytest
from annotated_types import Ge, Gt, Le

from agent_loop.bounds import Count, bounded, bounds_of


@bounded("part")
class Base:
    share: Annotated[float, Gt(0), Le(1)] = 1.0
    most: Annotated[int, Ge(1)] | None = None
    kind: Literal["a", "b"] | None = "a"

    def __post_init__(self) -> None:
        if self.kind == "b" and self.most is None:
            raise ValueError("part.kind is b without part.most")


@bounded("part")
class Child(Base):
    count: Count


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"share": 0}, "part.share is 0; must be > 0 and <= 1"),
        ({"share": float("nan")}, "part.share is nan"),
        ({"most": 0}, "part.most is 0; must be >= 1"),
        ({"kind": "c"}, "part.kind is 'c'; must be one of a, b"),
        ({"count": 0}, "part.count is 0; must be >= 1"),
        ({"kind": "b"}, "part.kind is b without part.most"),
        ({"kind": "b", "share": 2}, "part.share is 2"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_its_field_before_rules_over_several(values, text):
    with pytest.raises(ValueError) as caught:
        Child(**{"count": 1, **values})
    assert str(caught.value).startswith(text)
    with pytest.raises(ValueError):
        replace(Child(count=1), **values)


def test_values_at_the_bounds_are_accepted_and_none_is_no_value():
    assert Child(count=1, share=1, most=1, kind=None) == Child(count=1, share=1.0, most=1, kind=None)
    assert bounds_of(Annotated[float, Gt(0), Le(1)] | None) == [(">", 0), ("<=", 1)]
