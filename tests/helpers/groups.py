"""Small prompt groups for the tests of the message queue."""

import numpy as np

from message_queue.heads import head_of
from message_queue.sampling_support import SamplingSupport
from message_queue.tokens import RoutedExperts, RoutingSpec, StopReason, TokenOutput, WeightVersion
from message_queue.trajectory import Admission, PromptGroup, Trajectory

SPEC = RoutingSpec(layers=(1, 3), num_experts=8, top_k=2)


def segment(tokens=3, *, version=0, rows=None, stop_reason=StopReason.STOP, replica="replica-0"):
    """A segment of `tokens` tokens; `rows` is (first position, end position)."""
    return TokenOutput(
        token_ids=np.arange(tokens, dtype=np.int32),
        logprobs=np.linspace(-1.0, -0.5, tokens, dtype=np.float32),
        routed_experts=None if rows is None else routed(*rows, version=version),
        weights=WeightVersion(version, f"digest-{version}"),
        stop_reason=stop_reason,
        replica=replica,
    )


def support_of(sets):
    """The kept sets of consecutive positions; an empty one is the whole vocabulary."""
    counts, ids = [len(kept) for kept in sets], [token for kept in sets for token in sorted(kept)]
    return SamplingSupport.pack(np.array(counts, np.int64), np.array(ids, np.int64))


def sets_of(support):
    """The sets that `support_of` was given, in order; None stays None."""
    if support is None:
        return None
    counts, ids = support.unpack()
    return [part.tolist() for part in np.split(ids, np.cumsum(counts)[:-1])] if len(counts) else []


def routed(first, end, *, version=0, spec=SPEC, unavailable=0):
    """Rows that depend on their position and version."""
    layers, top_k = spec.row_shape
    at = np.arange(first, end)[:, None, None] + version * 3 + np.arange(layers)[None, :, None]
    experts = (at + np.arange(top_k)) % spec.num_experts
    return RoutedExperts(first_position=first, experts=experts.astype(spec.dtype), unavailable=unavailable)


def trajectory(*segments, prompt=2, reward=1.0, routing=None):
    """A closed single-turn trajectory."""
    made = Trajectory(routing=routing)
    made.observe(np.arange(prompt, dtype=np.int32))
    for part in segments or (segment(),):
        made.extend(part)
    made.close(stop_reason=StopReason.STOP, reward=reward)
    return made


def head_for(admission: Admission, *, versions=None, tokens=3):
    """The head of `group_for`."""
    return head_of(group_for(admission, versions=versions, tokens=tokens))


def group_for(admission: Admission, *, versions=None, tokens=3):
    """A finished group of one trajectory, sampled by `versions` in turn (default: the admitted one)."""
    segments = [segment(tokens, version=v) for v in versions or (admission.admitted_version,)]
    return PromptGroup(
        group=admission.group,
        prompt=admission.prompt,
        admitted_version=admission.admitted_version,
        admitted_update=admission.admitted_update,
        trajectories=[trajectory(*segments)],
    )
