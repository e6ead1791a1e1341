"""A queue in several processes: one keeps the books, n hold the content of groups; what they tell each other.

    client --- admit, take, trained, ... ---> books     who is open, ready, taken: every decision is made here
       +--- append, whole, contents ---> holder of group g: shard g % n

Each has a journal of its own, the holders' below that of the books: `journal/shard-00`. Content is durable before the
books say ready, and is given up after the books have settled it, so the books never promise what no holder has:

    put             whole in the holder, and durable -> ready in the books
    checkpointed    settled in the books, and durable -> forgotten by the holders
    restart         a ready group of which its holder has less than that is open again, and a note says so; what the
                    books do not know as in flight, the holders drop
"""
