"""How evenly routers use what they choose among, and a warning when one stops using a choice."""

import math
from collections.abc import Mapping, Sequence

HARDLY_USED = 0.05
"""A choice below this share of an even one is as good as lost."""
PATIENCE = 10
"""Records in a row in which a choice is hardly used before it is told: routers move about in the beginning."""


def usage_entropy(usage: Sequence[float]) -> float:
    """The entropy of the usage, as a share of log N: 1 when all choices are used alike, 0 when one has it all."""
    if len(usage) < 2:
        return 1.0
    return -sum(share * math.log(share) for share in usage if share > 0) / math.log(len(usage))


def lowest(usage: Sequence[float]) -> float:
    """The least used choice's share of an even one: 1 when all are used alike, 0 when one is never used."""
    return min(usage) * len(usage)


class UsageWatch:
    """Tells once of each router that a choice of it is hardly used any more."""

    def __init__(self) -> None:
        self._records: dict[str, int] = {}
        """Records in a row, up to the last, in which a choice of the router was hardly used."""
        self._told: set[str] = set()

    def look(self, usage: Mapping[str, Sequence[float]]) -> str | None:
        """What to tell after one more record, for all routers together; None if there is nothing new."""
        lost = []
        for router, shares in usage.items():
            self._records[router] = self._records.get(router, 0) + 1 if lowest(shares) < HARDLY_USED else 0
            if self._records[router] >= PATIENCE and router not in self._told:
                self._told.add(router)
                lost.append(f"{router} (choice {shares.index(min(shares)) + 1} of {len(shares)})")
        if not lost:
            return None
        return (
            f"routers that hardly use one of their choices (below {HARDLY_USED:.0%} of an even share in {PATIENCE} "
            f"records in a row): {', '.join(lost)}. A larger weight of a balance loss, such as "
            "`losses: {switch: 0.2}` of the router, spreads the tokens"
        )
