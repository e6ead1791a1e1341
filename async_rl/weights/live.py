"""Proof that an engine's parameters hold the published tensors.

The digests of the buckets prove that the engine read the tensors, not that its model has them. Therefore each rank also
reports sums over the values of its parameters after each load (`async_rl.weights.checksum.value_sums`). Engines fuse,
split, transpose, pad and pack tensors under their own names. None of this changes the sums, so that the first load, of
the checkpoint, shows the tensors that form each parameter:

    live        layers.3.self_attn.qkv_proj.weight     ranks 0 and 1: sums a, b
    published   layers.3.self_attn.{q,k,v}_proj.weight q, k, v           a + b = q + k + v at the start
    live        layers.3.mlp.experts.w13_weight[5]     rank 0: sum c
    published   layers.3.mlp.experts.5.{gate,up}_proj  g, u              c = g + u at the start

After every later load the same equations must hold for the new values. A single old value breaks them, and so does an
expert in the place of another one. Equal values that trade places inside one parameter do not break them; the probe
(`async_rl.controller.probe`) finds these. If a load rounds tensors to the engine's dtype, their rounded values count.

A parameter whose values are computed, not copied, has no equation. If published tensors without an equation changed,
such parameters of the same module have to change.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import TypeAlias

from async_rl.weights.digest import module_of

MOST_FUSED = 3  # tensors in one parameter
MOST_SIBLINGS = 12  # tensors next to each other; some may be fused
PACKED_SUFFIX = ".packed"  # of the name of a parameter that a CPU kernel holds in packed form

Published: TypeAlias = Mapping[str, Sequence[Sequence[int]]]
"""Name -> sums of a tensor: of its values, and of its rounded values if a load rounds them."""
Rank: TypeAlias = Mapping[str, tuple[str, Sequence[int]]]
"""Name -> checksum and sums of a parameter on one rank."""
_Part: TypeAlias = tuple[str, int]  # name of a tensor, leading index
_Place: TypeAlias = tuple[tuple[_Part, ...], range]  # parts of parameters, summed over ranks
_Form: TypeAlias = tuple[tuple[int, str, int], ...]  # (times, name, leading index) of published tensors


class LiveWeights:
    """The published tensors that form each parameter of an engine, and the last two loads.

    Args:
        published: sums of the tensors that the engine loaded at its start.
        ranks: parameters of each rank.
    """

    def __init__(self, *, published: Published, ranks: Sequence[Rank]) -> None:
        # A staged version replaces the weights of the load before the previous one.
        self._loads = deque([(published, ranks)], maxlen=2)
        self._forms: dict[_Place, list[_Form]] = _forms(published, ranks, known={})

    @property
    def checksum(self) -> str:
        """Checksum of all parameters on all ranks, equal for replicas with the same configuration and version."""
        whole = hashlib.blake2b(digest_size=8)
        for rank, parameters in enumerate(self._loads[-1][1]):
            for name in sorted(parameters):
                whole.update(f"{rank}|{name}|{parameters[name][0]}|".encode())
        return whole.hexdigest()

    def replace(self, published: Published, ranks: Sequence[Rank]) -> list[str]:
        """Compare a load with the published tensors and with the two recorded loads before it, then record it.

        Returns:
            the parameters that do not hold the published tensors. If there are any, the load is not recorded.
        """
        forms, refused, dropped = dict[_Place, list[_Form]](), dict[_Place, list[_Form]](), set[_Part]()
        for place, candidates in self._forms.items():
            if held := [form for form in candidates if _live(place, ranks) in _totals(form, published)]:
                forms[place] = held
            elif len(candidates) == 1 and all(_live(place, was) for _, was in self._loads):
                refused[place] = candidates
            else:  # several tensors had the same values, or only zeros: the right one may be no candidate
                dropped.update(place[0])
        forms = {place: held for place, held in forms.items() if dropped.isdisjoint(place[0])}
        forms |= _forms(published, ranks, known=forms | refused)
        wrong = [_text(place, candidates[0], ranks) for place, candidates in refused.items()]
        wrong += self._unchanged(published, ranks, forms | refused)
        if not wrong:
            self._loads.append((published, ranks))
            self._forms = forms
        return wrong

    def _unchanged(
        self, published: Published, ranks: Sequence[Rank], forms: Mapping[_Place, Sequence[_Form]]
    ) -> list[str]:
        """Modules with parameters without an equation that kept all values, though others were published."""
        used = {name for candidates in forms.values() for form in candidates for _, name, _ in form}
        names = {name for name, _ in _open(ranks, forms)}
        found: set[str] = set()
        for given, was in self._loads:
            changed = {module_of(n) for n in published.keys() - used if n in given and given[n][-1] != published[n][-1]}
            for module in changed:
                mine = [name for name in names if module_of(name) == module]
                if mine and all(now.get(n) == old.get(n) for now, old in zip(ranks, was, strict=True) for n in mine):
                    found |= set(mine)
        return sorted(found)


def _forms(published: Published, ranks: Sequence[Rank], *, known: Iterable[_Place]) -> dict[_Place, list[_Form]]:
    """Places that are not `known` -> the published tensors with equal sums.

    Parts of a module without a form are tried together, as the two halves of kv_b_proj in latent attention.
    """
    found: dict[_Place, list[_Form]] = {}
    for times in ({1}, set(_divisors(len(ranks)))):
        if not (left := _open(ranks, [*known, *found])):
            break
        modules = {module_of(name) for name, _ in left}
        names = [name for name in published if times == {1} or module_of(name) in modules]
        table = _table(published, names, times)
        for part in left:
            found |= _match((part,), ranks, table)
        left = _open(ranks, [*known, *found])
        for module in modules:
            found |= _match(tuple(part for part in left if module_of(part[0]) == module), ranks, table)
    return found


def _open(ranks: Sequence[Rank], places: Iterable[_Place]) -> list[_Part]:
    """Parts of parameters that are in none of `places`."""
    formed = {part for parts, _ in places for part in parts}
    every = ((name, index) for name, (_, sums) in ranks[0].items() for index in range(len(sums)))
    return [part for part in every if part not in formed]


def _table(published: Published, names: Iterable[str], times: Iterable[int]) -> dict[int, list[_Form]]:
    """Sum -> forms of one tensor, or of several whose names differ in the component before the last one.

    times: how often a tensor may be in a form; ranks of tensor parallelism share heads of k and v if there are few.
    """
    siblings: dict[tuple[str, ...], list[_Part]] = {}
    for name in names:
        path = name.split(".")
        for index in range(len(published[name][0])):
            siblings.setdefault((*path[:-2], path[-1], str(index)), []).append((name, index))
    table: dict[int, list[_Form]] = {}
    for parts in siblings.values():
        most = MOST_FUSED if len(parts) <= MOST_SIBLINGS else 1
        for size in range(1, min(most, len(parts)) + 1):
            for chosen, factors in product(combinations(parts, size), product(times, repeat=size)):
                form = tuple((factor, *part) for factor, part in zip(factors, chosen, strict=True))
                for total in _totals(form, published):
                    table.setdefault(total, []).append(form)
    return table


def _match(
    parts: Sequence[_Part], ranks: Sequence[Rank], table: Mapping[int, list[_Form]]
) -> dict[_Place, list[_Form]]:
    """Forms of parts on each rank, or on groups of ranks together; the same name comes first, then the same module."""
    name = parts[0][0].removesuffix(PACKED_SUFFIX) if parts else ""

    def nearness(form: _Form) -> int:
        return 2 * ([n for _, n, _ in form] == [name]) + (module_of(form[0][1]) == module_of(name))

    best, found = -1, dict[_Place, list[_Form]]()
    for size in _divisors(len(ranks)) if parts else ():
        places = [(tuple(parts), range(first, first + size)) for first in range(0, len(ranks), size)]
        forms = [table.get(-1 if (sums := _live(place, ranks)) is None else sums, []) for place in places]
        nearest = min(max((nearness(form) for form in some), default=-1) for some in forms)
        if nearest > best:
            near = [[form for form in some if nearness(form) >= nearest] for some in forms]
            best, found = nearest, dict(zip(places, near, strict=True))
    return found


def _divisors(number: int) -> Iterator[int]:
    return (size for size in range(1, number + 1) if number % size == 0)


def _live(place: _Place, ranks: Sequence[Rank]) -> int | None:
    """Sum over the parts and ranks of a place; None if a rank lacks a part."""
    parts, members = place
    try:
        return sum(ranks[rank][name][1][index] for rank in members for name, index in parts)
    except LookupError:
        return None


def _totals(form: _Form, published: Published) -> set[int]:
    """Sums of a form, with the published values and with rounded ones; empty if a tensor is not published."""
    try:
        return {sum(times * published[name][kind][index] for times, name, index in form) for kind in (0, -1)}
    except LookupError:
        return set()


def _text(place: _Place, form: _Form, ranks: Sequence[Rank]) -> str:
    """A place and its published tensors in words."""
    parts, members = place
    names = (f"{n}[{i}]" if len(ranks[members[0]].get(n, ("", ()))[1]) > 1 else n for n, i in parts)
    return f"{' and '.join(names)} on rank {' + '.join(map(str, members))}, made of {', '.join(n for _, n, _ in form)}"
