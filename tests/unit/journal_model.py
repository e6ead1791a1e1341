"""What a journal has to give back, as plain dicts, and random things to record."""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np

from message_queue.journal.disk import Disk
from message_queue.journal.errors import JournalStepError
from message_queue.journal.format import Entry, observation_entry, segment_entry
from message_queue.journal.log import JournalConfig, JournalLog
from message_queue.journal.open import GroupReader, Recovered, open_log
from message_queue.journal.records import (
    Admitted,
    Called,
    Checkpointed,
    Closed,
    Dropped,
    Published,
    Ready,
    Taken,
    Trained,
)
from message_queue.journal.state import JournalStart
from message_queue.tokens import StopReason, TokenOutput, WeightVersion
from tests.unit.groups import SPEC, routed, support_of

RUN = "run-1"
# How often each thing happens, so that groups get through all states.
WEIGHTS = {
    "admit": 3, "observe": 3, "sample": 6, "call": 1, "close": 7, "ready": 5, "take": 4, "train": 4, "drop": 1,
    "publish": 1, "checkpoint": 1,
}  # fmt: skip


class Model:
    """The journal as it should be. Trajectories are lists of what was appended."""

    def __init__(self) -> None:
        self.groups: dict[int, dict[str, Any]] = {}
        self.next_group = self.turn = self.prompt_cursor = self.version = self.update = 0
        self.train_step = self.settled = self.admitted = self.trained = self.dropped = 0
        self.tokens = {"trained": 0, "dropped": 0}
        self.made = 0

    def copy(self) -> Model:
        return copy.deepcopy(self)

    # ---- things to record

    def entry(self, action: str, pick: int) -> Entry | None:
        """An entry that follows on what is recorded; None where there is none for this action."""
        match action:
            case "admit":
                prompt = self.prompt_cursor + pick % 2
                body = Admitted(prompt, self.version, self.update, 1 + pick % 2, "append")
                return Entry(body, group=self.next_group)
            case "observe" | "sample" | "call" | "close":
                return self._content(action, pick)
            case "ready" | "take" | "train" | "drop":
                return self._event(action, pick)
            case "publish":
                self.made += 1
                return Entry(Published(self.version + 1 + pick % 2, self.update + pick % 2))
            case "checkpoint":
                return Entry(Checkpointed(self.settled + pick % (self.train_step - self.settled + 1)))
        raise AssertionError(action)

    def _content(self, action: str, pick: int) -> Entry | None:
        open_ones = [(g, i) for g in self._in("open") for i, t in enumerate(self.groups[g]["content"]) if not closed(t)]
        if not open_ones:
            return None
        group, i = open_ones[pick % len(open_ones)]
        content = self.groups[group]["content"][i]
        at, self.made = length(content), self.made + 1
        ids = np.arange(self.made, self.made + 1 + pick % 3, dtype=np.int32)
        if action == "observe" or not content:
            return observation_entry(group, i, ids, at=at)
        if action == "call":
            return Entry(Called(at, f"tool {self.made}"), group=group, trajectory=i)
        if action == "close":
            return Entry(Closed(at, StopReason.STOP, float(self.made), {"turns": 1.0}), group=group, trajectory=i)
        held = rows_held(content)
        segment = TokenOutput(
            token_ids=ids,
            logprobs=np.full(len(ids), -1.0 / self.made, np.float32),
            routed_experts=routed(max(0, held - pick % 2), at + len(ids) - 1, version=self.made),
            weights=WeightVersion(self.version, f"digest-{self.version}"),
            stop_reason=StopReason.ABORT,
            replica=f"replica-{pick % 2}",
            support=support_of([range(token, token + 1 + pick % 3) for token in ids.tolist()]) if pick % 2 else None,
        )
        return segment_entry(group, i, segment, at=at, rows_held=held)

    def _event(self, action: str, pick: int) -> Entry | None:
        if action == "drop":
            live = self._in("open", "ready", "taken")
            return Entry(Dropped("expired: too old"), group=live[pick % len(live)]) if live else None
        before = {"ready": "open", "take": "ready", "train": "taken"}[action]
        groups = [g for g in self._in(before) if all(map(closed, self.groups[g]["content"]))]
        if not groups:
            return None
        chosen = tuple(groups[: 1 + pick % 2])
        match action:
            case "ready":
                return Entry(Ready(), group=groups[pick % len(groups)])
            case "take":
                return Entry(Taken(chosen, self.update + pick % 3))
            case _:
                return Entry(Trained(chosen, self.train_step + 1))

    def _in(self, *states: str) -> list[int]:
        return [g for g, group in self.groups.items() if group["state"] in states]

    # ---- what is recorded

    def apply(self, entry: Entry) -> None:
        body, group = entry.body, self.groups.get(entry.group)
        match body:
            case Admitted():
                self.groups[entry.group] = {
                    "state": "open", "prompt": body.prompt, "version": body.version, "update": body.update,
                    "content": [[] for _ in range(body.trajectories)], "turn": 0, "taken": None, "step": None,
                    "trained": None,
                }  # fmt: skip
                self.next_group, self.admitted = entry.group + 1, self.admitted + 1
                self.prompt_cursor = max(self.prompt_cursor, body.prompt + 1)
            case Ready():
                group["state"], group["turn"], self.turn = "ready", self.turn, self.turn + 1
            case Taken():
                for g in body.groups:
                    self.groups[g].update(state="taken", taken=body.update, turn=self.turn)
                    self.turn += 1
            case Trained():
                for g in body.groups:
                    self.groups[g].update(state="trained", step=body.train_step, trained=self.groups[g]["taken"])
                self.train_step = body.train_step
            case Dropped():
                self.dropped, self.tokens["dropped"] = self.dropped + 1, self.tokens["dropped"] + sampled(group)
                del self.groups[entry.group]
            case Published():
                self.version, self.update = body.version, body.update
            case Checkpointed():
                self._settle(body.train_step)
            case _:
                payload = b"".join(bytes(part) for part in entry.payload)
                group["content"][entry.trajectory].append((body, payload))

    def _settle(self, train_step: int) -> None:
        for g in [g for g, group in self.groups.items() if group["step"] is not None and group["step"] <= train_step]:
            self.trained, self.tokens["trained"] = self.trained + 1, self.tokens["trained"] + sampled(self.groups[g])
            del self.groups[g]
        self.settled = max(self.settled, train_step)

    def restart(self, start: JournalStart) -> None:
        self._settle(start.train_step)
        self.train_step, self.update = start.train_step, start.update
        waiting = [g for g, group in self.groups.items() if group["state"] != "open"]
        waiting.sort(key=lambda g: self.groups[g]["turn"])
        for update in ("taken", "trained"):
            waiting.sort(key=lambda g: (self.groups[g][update] is None, self.groups[g][update] or 0))
        for turn, g in enumerate(waiting):
            self.groups[g].update(state="ready", turn=turn, taken=None, step=None)
        self.turn = len(waiting)

    def view(self) -> dict[str, Any]:
        """What a restart gives back."""
        ready = sorted(self._in("ready"), key=lambda g: self.groups[g]["turn"])
        return {
            "trained": {g: self.groups[g]["trained"] for g in ready if self.groups[g]["trained"] is not None},
            "open": {g: content_of(self.groups[g]["content"]) for g in self._in("open")},
            "ready": [(g, content_of(self.groups[g]["content"])) for g in ready],
            "ids": {g: tuple(self.groups[g][key] for key in ("prompt", "version", "update")) for g in self.groups},
            "next_group": self.next_group,
            "prompt_cursor": self.prompt_cursor,
            "version": self.version,
            "train_step": self.train_step,
            "ledger": (self.admitted, self.trained, self.dropped, len(self.groups)),
            "tokens": (self.tokens["trained"], self.tokens["dropped"]),
        }


def length(content: list) -> int:
    observed = sum(body.tokens for body, _ in content if hasattr(body, "tokens"))
    return observed + sum(body.message.num_sampled() for body, _ in content if hasattr(body, "message"))


def closed(content: list) -> bool:
    return bool(content) and isinstance(content[-1][0], Closed)


def sampled(group: dict[str, Any]) -> int:
    return sum(b.message.num_sampled() for t in group["content"] for b, _ in t if hasattr(b, "message"))


def rows_held(content: list) -> int:
    ends = [0]
    for body, _ in content:
        if hasattr(body, "message"):
            rows = next(body.message.segments()).rows
            ends.append(rows.first_position + rows.count)
    return max(ends)


def content_of(trajectories: list) -> list[tuple]:
    """Trajectories as what they hold: records with their bytes, but for the calls."""
    return [tuple((type(b).__name__, b, p) for b, p in t if not isinstance(b, Called)) for t in trajectories]


# ---- what a journal gave back


def view_of(log: JournalLog, recovered: Recovered) -> dict[str, Any]:
    """The same as `Model.view`, from what was recovered."""
    ledger = recovered.ledger
    assert ledger.error == 0
    groups = [*recovered.open, *recovered.ready]
    return {
        "trained": dict(recovered.trained),
        "open": {g.admission.group: stored(log, g.admission.group) for g in recovered.open},
        "ready": [(g.admission.group, stored(log, g.admission.group)) for g in recovered.ready],
        "ids": {a.group: (a.prompt, a.admitted_version, a.admitted_update) for a in (g.admission for g in groups)},
        "next_group": recovered.next_group,
        "prompt_cursor": recovered.prompt_cursor,
        "version": recovered.version,
        "train_step": recovered.train_step,
        "ledger": (ledger.admitted, ledger.trained, ledger.dropped, ledger.open),
        "tokens": (ledger.trained_tokens, ledger.dropped_tokens),
    }


def stored(log: JournalLog, group: int) -> list[tuple]:
    """Content of a live group as its records on the disk hold it; it also has to make a PromptGroup."""
    live = log.state.live[group]
    content: list[list] = [[] for _ in live.progress]
    for span in live.spans:
        entry = log.files.read(span)
        content[entry.trajectory].append((entry.body, bytes(entry.payload[0])))
    made = GroupReader(live.admission, live.resume_routing, len(live.progress), log.records(live)).read(SPEC)
    assert [len(t) for t in made.trajectories] == [length(t) for t in content]
    assert [t.closed for t in made.trajectories] == [closed(t) for t in content]
    return content_of(content)


def opened(
    disk: Disk,
    *,
    train_step: int = 0,
    update: int = 0,
    fsync: str = "never",
    max_file_bytes: int = 1024,
    start: JournalStart | None = None,
) -> tuple[JournalLog, Recovered]:
    return open_log(
        disk,
        run=RUN,
        config=JournalConfig(fsync=fsync, max_file_bytes=max_file_bytes),
        start=start or JournalStart(train_step=train_step, update=update),
    )


def opened_near(disk: Disk, *, train_step: int, **options: Any) -> tuple[JournalLog, Recovered]:
    """Opened at the checkpoint of `train_step`, or of the one nearest to it that the journal accepts."""
    try:
        return opened(disk, train_step=train_step, **options)
    except JournalStepError as error:
        found = re.search(r"(?:ends at step|up to train step) (\d+)", str(error))
        assert found is not None
        return opened(disk, train_step=int(found.group(1)), **options)
