"""Checks of a run's `trace.json`."""

from collections import defaultdict

from async_rl.metrics.trace import read_trace

CHAIN = ["admit", "rollout", "trajectory", "queue", "train", "publish"]


def check_nesting(spans):
    """Of two spans on a lane, each pair is apart, or one is inside the other."""
    lanes = defaultdict(list)
    for span in spans:
        lanes[span["pid"], span["tid"]].append((span["ts"], -span["dur"]))
    for lane, found in lanes.items():
        ends = []
        for start, length in sorted(found):
            while ends and ends[-1] <= start:
                ends.pop()
            assert not ends or start - length <= ends[-1], (lane, start)
            ends.append(start - length)


def check_trace(directory, *, trained):
    """Spans nest, and flows connect those of each group in `trained`, whose gradients were published.

    Returns process -> its kinds of spans.
    """
    events = read_trace(directory / "trace.json")
    spans = [event for event in events if event["ph"] == "X"]
    check_nesting(spans)
    kinds, chains = defaultdict(set), defaultdict(list)
    for span in spans:
        kinds[span["pid"]].add(span["cat"])
    begun = {(span["tid"], span["ts"], span["cat"]): span["args"] for span in spans if span["cat"] in CHAIN}
    for event in events:
        for kind in CHAIN if event["ph"] in ("s", "t", "f") else ():
            args = begun.get((event["tid"], event["ts"], kind), {})
            if event["id"] in args.get("groups", [args.get("group")]):
                chains[event["id"]].append((event["ts"], CHAIN.index(kind), event["ph"]))
    for group in trained:
        chain = sorted(chains[group])
        found = [CHAIN[number] for _, number, _ in chain]
        assert list(dict.fromkeys(found)) == CHAIN, (group, found)
        assert "".join(phase for *_, phase in chain).replace("t", "") == "sf", chain
    return dict(kinds)
