"""Defects planted in what the books of a queue, the holders of its content and the driver tell each other."""

from dataclasses import replace

from message_queue.journal import Journal
from message_queue.journal.open import mark_of
from message_queue.shards import holder
from message_queue.shards.holder import ContentHolder
from message_queue.together import TogetherHost


def a_group_that_is_ready_before_its_holder_has_it_on_the_disk(patch):
    async def mark(self, group):
        return await self._submit(self._job(lambda log: mark_of(log, group)))

    patch.setattr(Journal, "mark", mark)


def holders_that_forget_what_was_trained_and_is_in_no_checkpoint(patch):
    whole = ContentHolder.settle

    async def settle(self, books):
        await whole(self, replace(books, live=books.wanted))

    patch.setattr(ContentHolder, "settle", settle)


def holders_that_keep_content_of_groups_that_nobody_knows(patch):
    async def begin(self, books):
        for group in self._numbers:
            self._contents.begin(group)
        self._books = books

    patch.setattr(holder.ContentHolder, "begin", begin)


def answers_that_are_taken_for_received_when_they_are_sent(patch):
    whole = TogetherHost.collect

    async def collect(self, name, received):
        self._client(name).kept.clear()
        return await whole(self, name, received)

    patch.setattr(TogetherHost, "collect", collect)


SHARD_MUTATIONS = (
    (a_group_that_is_ready_before_its_holder_has_it_on_the_disk, ("exactly once",), "machine dies"),
    (holders_that_forget_what_was_trained_and_is_in_no_checkpoint, ("exactly once", "failure")),
    (answers_that_are_taken_for_received_when_they_are_sent, ("failure",), "message twice"),
    (holders_that_keep_content_of_groups_that_nobody_knows, ("failure", "exactly once"), "machine dies"),
)
