"""A journal that lost what was written of a version: what it sampled is never taken for newer than it is."""

import asyncio
import random
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from message_queue.log import WRITTEN, JournaledLog
from message_queue.staleness import Policy
from message_queue.versions import known_updates
from tests.unit.journal_disk import FakeDisk
from tests.unit.test_policy_change import Drive
from tests.unit.test_restart import opened


@st.composite
def histories(draw):
    """(updates of each version, which of them are known, (version, updates) of admissions, versions that sampled)"""
    updates = sorted(draw(st.lists(st.integers(0, 20), min_size=1, max_size=8)))
    versions = st.integers(0, len(updates) - 1)
    some = st.sets(versions, max_size=len(updates))
    return updates, draw(some), [(v, updates[v]) for v in draw(some)], draw(some)


@given(histories())
def test_updates_of_a_lost_version_are_at_most_what_it_held_and_no_order_is_lost(history):
    updates, written, admitted, used = history
    known = known_updates({v: updates[v] for v in written}, admitted=admitted, used=used)
    assert known.keys() == {*written, *used, *(version for version, _ in admitted)}
    assert all(known[version] <= updates[version] for version in known)
    assert all(known[version] == updates[version] for version in [*written, *(version for version, _ in admitted)])
    assert [known[version] for version in sorted(known)] == sorted(known.values())


def test_updates_that_a_restart_took_back_are_no_more_than_those_of_later_versions():
    assert known_updates({7: 4}, admitted=[(5, 6)], used=[6]) == {5: 4, 6: 4, 7: 4}


async def restarted(seed, calls, policy, s):
    """Run, lose records of versions, restart, train what is left: no token is older than the bound in truth."""
    rng, disk = random.Random(seed), FakeDisk()
    service, client, _ = await opened(disk, s=s, policy=policy)
    drive = Drive(service, client)
    await drive.go(rng, calls)
    updates = dict(service._queue._versions.updates)
    service, client, restored = await opened(
        disk.after_kill(), s=s, policy=policy, step=drive.saved, checkpoint=drive.checkpoint
    )
    end = drive.saved + restored.replay
    assert all(of <= min(updates[version], end) for version, of in restored.version_updates.items())
    snapshot = await client.snapshot()
    for admission in snapshot.unfinished:
        assert admission.admitted_update == restored.version_updates[admission.admitted_version]
    again = Drive(
        service, client, step=drive.saved, version=restored.version, replayed=end, prompt=restored.prompt_cursor
    )
    for group in (g for g in restored.open if g.closed):
        await client.put(group)
    while (batch := await again.train(rng)) is not None:
        updates |= {version: update for version, update in batch.version_updates.items() if version > drive.version}
        for group in batch.groups:
            young = [v for v in group.tokens_per_version() if batch.version_updates[v] >= batch.min_update]
            assert all(batch.update - min(updates[v], end) <= s for v in young)
    assert (await client.snapshot()).ledger.error == 0


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    calls=st.integers(20, 120),
    policy=st.sampled_from(get_args(Policy)),
    s=st.integers(0, 3),
    lost=st.floats(0.2, 1.0),
)
def test_the_bound_holds_where_records_of_versions_are_lost(seed, calls, policy, s, lost):
    fate, write = random.Random(seed), JournaledLog.published

    def published(self, version, *, update):
        return WRITTEN if fate.random() < lost else write(self, version, update=update)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JournaledLog, "published", published)
        asyncio.run(restarted(seed, calls, policy, s))
