"""Which calls are over, so that a message that comes late or twice does not begin them again."""

from __future__ import annotations


class EndedTickets:
    """Tickets that are over.

    Those of a client are `name/number`, counted up from 0, so that few of them have to be remembered one by one.
    """

    def __init__(self) -> None:
        self._below: dict[str, int] = {}  # of each client, all numbers below this one are over
        self._above: dict[str, set[int]] = {}

    def __contains__(self, ticket: str) -> bool:
        name, number = _read(ticket)
        return number < self._below.get(name, 0) or number in self._above.get(name, ())

    def __len__(self) -> int:
        """Numbers that are remembered one by one."""
        return sum(map(len, self._above.values()))

    def add(self, ticket: str) -> None:
        """A call is over."""
        name, number = _read(ticket)
        if ticket in self:
            return
        above, below = self._above.setdefault(name, set()), self._below.get(name, 0)
        above.add(number)
        while below in above:
            above.remove(below)
            below += 1
        self._below[name] = below


def _read(ticket: str) -> tuple[str, int]:
    """(client, number); a ticket that is not numbered is a client of its own."""
    name, _, number = ticket.rpartition("/")
    return (name, int(number)) if number.isdecimal() else (ticket, 0)
