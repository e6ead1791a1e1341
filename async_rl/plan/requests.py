"""Requests of a run: the decode step that fits them, slow replicas, and the parts of a request.

`division.py` says what the parts mean.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray

from async_rl.plan.records import Records, Span

Floats = NDArray[np.float64]
SLOW = 1.3  # seconds per token of a slow replica, over those of the others
USUAL = 0.9  # quantile of the lengths above which a trajectory is long
TRIMS = 3
LEAST_REQUESTS = 20  # of a fit
FITS = 20


def trained_groups(records: Records) -> Mapping[int, Sequence[int]]:
    """Last train step of each batch -> its groups."""
    found: dict[int, list[int]] = defaultdict(list)
    for group, record in records.ledger.items():
        if record["outcome"] == "trained":
            found[record["train_step"]].append(group)
    for span in records.of("train"):
        groups = span.args.get("groups")
        if isinstance(groups, list):
            found[span.args["step"]] = groups
    return found


class RequestModel:
    """See the module.

    Attributes:
        decode_s: a, seconds of a decode step without requests.
        decode_s_per_request: b, seconds that each request adds.
        slow: replica -> its seconds per token over those of the others, if they are at least SLOW.
        max_running: requests that a replica decodes at a time.
        running: mean of the requests of a replica while it has any.
        busy: share of the time, from the first to the last request, while a replica has any; mean over replicas.
        turns: mean of the turns of a trajectory.
        gaps: seconds between its turns, without pauses of the replica: tools, environments and rollout workers.
        rewarded: seconds from the end of a trajectory's last request until its reward and scores were there.
        stretch: seconds of requests over those of their decode steps; prefills make them longer.
        prefill_tokens_per_s: rate of a replica, from what aborted requests take longer; infinite if they do not.
    """

    def __init__(self, records: Records) -> None:
        requests = [s for s in records.of("generate") if s.seconds > 0 and s.args["replica"]]  # "" if it has no answer
        self.max_running = int(records.config["engine"].get("max_num_seqs", 256))
        rollout = records.config["rollout"]
        self._recomputes = rollout["on_update"] == "keep" and rollout["kv"] == "recompute"
        groups = {span.args.get("group") for span in records.of("rollout")}
        self._pauses = _open(records.of("pause"), lambda span: span.process)
        self._of_trajectory: dict[int, dict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))
        for span in sorted(
            (*requests, *(found for kind in ("tool", "reward", "score") for found in records.of(kind))),
            key=lambda s: s.start,
        ):
            if span.args.get("group") in groups:
                self._of_trajectory[span.args["group"]][span.args.get("trajectory", 0)].append(span)
        self._all = _open(requests)
        self._tokens = Counter[str]()
        for span in requests:
            self._tokens[_replica(span)] += span.args["tokens"]
        self._held_out = _open([s for s in requests if s.args.get("group") not in groups])
        self._own = [s for s in requests if s.args.get("group") in groups]
        self._trajectories = [spans for group in self._of_trajectory.values() for spans in group.values()]
        lengths = [_sampled(spans) for spans in self._trajectories]
        self._usual_tokens = float(np.quantile(lengths, USUAL)) if lengths else 0.0
        self.running, self.busy = _mean_running(self._all)
        self.slow: dict[str, float] = {}
        self.decode_s, self.decode_s_per_request = self._fit(self._first_segments())
        self._find_slow()
        self._correct_by_continued()
        self.turns = float(np.mean([_turns(spans) for spans in self._trajectories])) if self._trajectories else 1.0
        self.gaps = [gap for spans in self._trajectories for gap in self._gaps(spans)]
        self.rewarded = [
            max(0.0, max(ends) - requested[-1].end)
            for spans in self._trajectories
            if (requested := _requests(spans)) and (ends := [s.end for s in spans if s.kind in ("reward", "score")])
        ]
        self.stretch = self._stretch()
        self.prefill_tokens_per_s = self._prefill()

    def critical(self, group: int) -> Sequence[Span] | None:
        """Requests, tools and rewards of the trajectory of a group that ended last."""
        found = self._of_trajectory.get(group)
        return None if not found else max(found.values(), key=lambda spans: spans[-1].end)

    def longer_than_usual(self, spans: Sequence[Span]) -> float:
        """Part of a trajectory's tokens beyond the length of nine tenths of all."""
        return max(0.0, 1 - self._usual_tokens / max(1.0, _sampled(spans)))

    def parts(self, span: Span, *, aborted: bool) -> dict[str, float]:
        """Causes of the seconds of a request, and `latency`; they add up to its duration.

        Args:
            aborted: whether the trajectory's request before was aborted.
        """
        replica, tokens = _replica(span), span.args["tokens"]
        paused = self._paused(span)
        spent, running = self._spent(span), self._all[replica].mean(span.start, span.end)
        held_out = self._held_out[replica].mean(span.start, span.end) if replica in self._held_out else 0.0
        latency, shared = tokens * self.decode_s, tokens * self.decode_s_per_request * running
        slower = (latency + shared) * (self.slow.get(replica, 1.0) - 1)
        rest = spent - latency - shared - slower
        if rest < 0:
            scale = spent / (latency + shared + slower)
            latency, shared, slower, rest = latency * scale, shared * scale, slower * scale, 0.0
        of_validation = held_out / running if running else 0.0
        found = {"publish": paused, "latency": latency, "replica": slower}
        found["engines"] = shared * (1 - of_validation)
        found["validation"] = shared * of_validation
        if running > self.max_running:
            found["slots"] = rest * (1 - of_validation)
            found["validation"] += rest * of_validation
        elif aborted or (paused and self._recomputes):
            found["repeat"] = rest
        else:
            found["engines"] += rest
        return found

    def _expected(self, span: Span, decode_s: float, per_request_s: float) -> float:
        """Seconds of a request by the decode steps alone, on a replica that is not slow."""
        running = self._all[_replica(span)].mean(span.start, span.end)
        step_s = decode_s + per_request_s * min(running, self.max_running)
        return span.args["tokens"] * step_s * max(1.0, running / self.max_running)

    def _spent(self, span: Span) -> float:
        return max(0.0, span.seconds - self._paused(span))

    def _paused(self, span: Span) -> float:
        return self._pause(_replica(span), span.start, span.end)

    def _pause(self, replica: str, start: float, end: float) -> float:
        pauses = self._pauses.get(replica)
        return 0.0 if pauses is None else float(pauses.between(start, end))

    def _first_segments(self) -> list[Span]:
        """Requests that no abort and no pause made longer, if there are enough; otherwise all."""
        continued = {id(span) for span in self._continued()}
        sampled = (span for spans in self._trajectories for span in _requests(spans) if span.args["tokens"])
        found = [span for span in sampled if id(span) not in continued and not self._paused(span)]
        return found if len(found) >= LEAST_REQUESTS else [span for span in self._own if span.args["tokens"]]

    def _fit(self, requests: Sequence[Span]) -> tuple[float, float]:
        """a and b over all replicas, whose times are laid one after the other.

        Prefills only make requests longer, so it is refitted to the half that is fastest by the fit. If requests
        queue for a slot, those that did not give the proportion of a and b, and the tokens of all the level.
        """
        if not requests:
            return 0.0, 0.0
        if self.running > self.max_running:
            decoded = [s for s in requests if self._all[_replica(s)].most(s.start, s.end) <= self.max_running]
            return self._at_level(*self._fit_all(decoded if len(decoded) >= LEAST_REQUESTS else requests))
        kept = list(requests)
        for _ in range(TRIMS):
            found = self._fit_all(kept)
            if len(requests) < 2 * LEAST_REQUESTS:
                break
            over = [self._spent(span) / max(1e-12, self._expected(span, *found)) for span in requests]
            middle = float(np.median(over))
            kept = [span for span, each in zip(requests, over, strict=True) if each <= middle]
        return self._fit_all(kept)

    def _at_level(self, decode_s: float, per_request_s: float) -> tuple[float, float]:
        """a and b in the proportion given, such that the replicas decode as many tokens as they did."""
        tokens = expected = 0.0
        for name, each in self._all.items():
            running, seconds = np.minimum(each.values, self.max_running), np.diff(each.times)
            if name in self._pauses:
                seconds -= self._pauses[name].between(each.times[:-1], each.times[1:])
            expected += float((seconds * running / (decode_s + per_request_s * running + 1e-12)).sum())
            tokens += self._tokens[name]
        return decode_s * expected / tokens, per_request_s * expected / tokens

    def _fit_all(self, requests: Sequence[Span]) -> tuple[float, float]:
        length = max(s.end for s in requests) + 1
        place = {name: number * length for number, name in enumerate(self._all)}
        times = [each.times + place[name] for name, each in self._all.items()]
        values = [[*each.values, 0.0] for each in self._all.values()]
        return fit_decode_step(
            np.array([s.args["tokens"] for s in requests], np.float64),
            np.array([self._spent(s) for s in requests]),
            start=np.array([s.start + place[_replica(s)] for s in requests]),
            end=np.array([s.end + place[_replica(s)] for s in requests]),
            running=StepFunction(np.concatenate(times), np.concatenate(values)[:-1]),
            max_running=self.max_running,
        )

    def _correct_by_continued(self) -> None:
        """Lower a and b if the requests that continue aborted ones show that prefills made all requests longer.

        A continued request waits for the prefill and then decodes, so its seconds are fitted with a constant.
        """
        spans = [span for span in self._continued() if span.args["tokens"]]
        if len(spans) < LEAST_REQUESTS or self.running > self.max_running:
            return
        tokens = np.array([span.args["tokens"] for span in spans], np.float64)
        running = np.array([self._all[_replica(span)].mean(span.start, span.end) for span in spans])
        columns = np.stack([np.ones(len(spans)), tokens, tokens * running], axis=1)
        _, decode_s, per_request_s = not_negative(columns, np.array([self._spent(span) for span in spans]))
        mean = float(running.mean())
        step_s = self.decode_s + self.decode_s_per_request * mean
        scale = min(1.0, (decode_s + per_request_s * mean) / max(1e-12, step_s)) or 1.0
        self.decode_s, self.decode_s_per_request = self.decode_s * scale, self.decode_s_per_request * scale

    def _continued(self) -> Iterator[Span]:
        """Requests that continue an aborted one."""
        for spans in self._trajectories:
            yield from (span for before, span in pairwise(_requests(spans)) if before.args.get("aborted"))

    def _gaps(self, spans: Sequence[Span]) -> Iterator[float]:
        for before, span in pairwise(_requests(spans)):
            if not before.args.get("aborted"):
                yield max(0.0, span.start - before.end - self._pause(_replica(span), before.end, span.start))

    def _stretch(self) -> float:
        """1 if requests queue, as a and b then have the level of all tokens, or if prefills have their own rate."""
        continued = {id(span) for span in self._continued()}
        if self.running > self.max_running or len(continued) >= LEAST_REQUESTS:
            return 1.0
        fast = [s for s in self._own if id(s) not in continued and _replica(s) not in self.slow]
        expected = sum(self._expected(span, self.decode_s, self.decode_s_per_request) for span in fast)
        return sum(map(self._spent, fast)) / expected if expected else 1.0

    def _find_slow(self) -> None:
        """Compare each replica with the others, and fit the decode step without the slow ones."""
        levels = self._levels()
        for name, level in levels.items():
            others = [other for each, other in levels.items() if each != name]
            if others and level > SLOW * float(np.median(others)):
                self.slow[name] = level / float(np.median(others))
        if not self.slow:
            return
        fast = [s for s in self._first_segments() if _replica(s) not in self.slow]
        if len(fast) >= LEAST_REQUESTS:
            self.decode_s, self.decode_s_per_request = self._fit(fast)
            levels = self._levels()
            self.slow = {name: max(1.0, levels[name]) for name in self.slow}

    def _prefill(self) -> float:
        """Tokens per second at which the sampled tokens of aborted requests would be prefilled once more.

        A continuation waits for the prefill of all requests of its replica; the tokens of prompts are not known, so
        they make the rate lower.
        """
        tokens = waited = 0.0
        for requests in map(_requests, self._trajectories):
            sampled = 0
            for before, span in pairwise(requests):
                sampled += before.args["tokens"]
                if before.args.get("aborted"):
                    waited += self.parts(span, aborted=True).get("repeat", 0.0)
                    tokens += sampled * self._all[_replica(span)].mean(span.start, span.end)
        return tokens / waited if tokens and waited else math.inf

    def _levels(self) -> dict[str, float]:
        """Replica -> seconds of its requests over those of the decode steps, if it has enough requests."""
        spent: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for span in self._first_segments():
            expected = self._expected(span, self.decode_s, self.decode_s_per_request)
            spent[_replica(span)].append((self._spent(span), expected))
        return {
            name: sum(s for s, _ in each) / max(1e-12, sum(e for _, e in each))
            for name, each in spent.items()
            if len(each) >= LEAST_REQUESTS // 2
        }


def _requests(spans: Sequence[Span]) -> list[Span]:
    """Requests of a trajectory, in order."""
    return [span for span in spans if span.kind == "generate"]


def _turns(spans: Sequence[Span]) -> int:
    """Requests that do not continue an aborted one."""
    return sum(not span.args.get("aborted") for span in _requests(spans))


def _sampled(spans: Sequence[Span]) -> int:
    return sum(span.args["tokens"] for span in _requests(spans))


def _replica(span: Span) -> str:
    return str(span.args.get("replica"))


def _open(spans: Iterable[Span], key: Callable[[Span], str] = _replica) -> dict[str, StepFunction]:
    """Key -> its open spans over time."""
    found: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        found[key(span)].append(span)
    return {
        name: StepFunction.of_open(np.array([s.start for s in each]), np.array([s.end for s in each]))
        for name, each in sorted(found.items())
    }


def _mean_running(counts: Mapping[str, StepFunction]) -> tuple[float, float]:
    """Mean of the requests while there are any, and the share of the time with any."""
    if not counts:
        return 0.0, 0.0
    open_s = sum(float(np.diff(each.times)[each.values > 0].sum()) for each in counts.values())
    whole_s = max(each.times[-1] for each in counts.values()) - min(each.times[0] for each in counts.values())
    return sum(float(each.integral[-1]) for each in counts.values()) / open_s, open_s / len(counts) / float(whole_s)


# ---- the decode step, a + b n seconds with n requests on a replica


@dataclass(frozen=True, slots=True)
class StepFunction:
    """A function of time that is constant between some times, and zero before and after them.

    Requests from 0 to 2 s and from 1 to 4 s: times [0, 1, 2, 4] and values [1, 2, 1].
    """

    times: Floats
    """float64 [T], seconds."""
    values: Floats
    """float64 [T - 1], from each time to the next."""
    integral: Floats = field(init=False)
    """float64 [T], from the first time to each."""

    def __post_init__(self) -> None:
        integral = np.concatenate([[0.0], (self.values * np.diff(self.times)).cumsum()])
        object.__setattr__(self, "integral", integral)

    @classmethod
    def of_open(cls, starts: Floats, ends: Floats) -> StepFunction:
        """Number of intervals that are open at a time."""
        times = np.unique([*starts, *ends])
        changes = np.zeros(len(times))
        np.add.at(changes, np.searchsorted(times, starts), 1)
        np.add.at(changes, np.searchsorted(times, ends), -1)
        return cls(times, changes.cumsum()[:-1])

    def between(self, start: Floats | float, end: Floats | float) -> Floats:
        """Integral over each interval."""
        return np.asarray(np.interp(end, self.times, self.integral) - np.interp(start, self.times, self.integral))

    def mean(self, start: float, end: float) -> float:
        """Mean over an interval; 0 if it has no length."""
        return float(self.between(start, end)) / (end - start) if end > start else 0.0

    def most(self, start: float, end: float) -> float:
        """Largest value in an interval between the first and the last time."""
        first, last = self.times.searchsorted(start, side="right") - 1, self.times.searchsorted(end)
        return float(self.values[first:last].max())


def fit_decode_step(
    tokens: Floats, spent: Floats, *, start: Floats, end: Floats, running: StepFunction, max_running: int
) -> tuple[float, float]:
    """Seconds of a decode step without requests, and per request of a replica, by least squares.

    Args:
        tokens: float64 [requests], tokens that each request decodes one after the other.
        spent: float64 [requests], seconds that they took.
        start: float64 [requests], start of each request, in seconds.
        end: float64 [requests], its end; there may be pauses between.
        running: requests of the replica over time.
        max_running: requests that a replica decodes at a time; others wait.
    """
    lasted = running.between(start, end) > 0  # one that ends as it starts tells nothing
    tokens, spent, start, end = tokens[lasted], spent[lasted], start[lasted], end[lasted]
    waits = np.maximum(1, running.values / max_running)  # seconds per token of a request, over those of a decode step

    def improved(a: float, b: float) -> tuple[float, float, float]:
        """a and b from the progress of the requests by a and b, and the squared error."""
        progress = np.where(running.values > 0, 1 / (a * waits + b * running.values + 1e-12), 0.0)  # tokens per second
        decoded = StepFunction(running.times, progress).between(start, end)
        # The mean over the tokens of each request.
        means = [
            StepFunction(running.times, v * progress).between(start, end) / decoded for v in (waits, running.values)
        ]
        columns = tokens[:, None] * np.stack(means, axis=1)
        a, b = map(float, not_negative(columns, spent))
        return a, b, float(((columns @ (a, b) - spent) ** 2).sum())

    # From two places, because b=0 may be a fixed point: a step that requests do not change, and one that they do.
    found: list[tuple[float, float, float]] = []
    for a, b in ((1.0, 0.0), (1.0, 1.0)):
        error = math.inf
        for _ in range(FITS):
            a, b, error = improved(a, b)
        found.append((a, b, error))
    return min(found, key=lambda each: each[2])[:2]


def not_negative(columns: Floats, values: Floats) -> Floats:
    """Least squares with coefficients >= 0, over all subsets of the columns.

    Args:
        columns: float64 [values, columns].
        values: float64 [values].

    Returns:
        float64 [columns].
    """
    best, least = np.zeros(columns.shape[1]), math.inf
    for chosen in product((False, True), repeat=columns.shape[1]):
        found = np.zeros(columns.shape[1])
        found[list(chosen)] = np.linalg.lstsq(columns[:, chosen], values, rcond=None)[0]
        error = float(((columns @ found - values) ** 2).sum())
        if (found >= 0).all() and error < least:
            best, least = found, error
    return best
