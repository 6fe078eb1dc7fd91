"""Counts of calls that heedful ran, and of those that torch ran."""

from collections import Counter

from heedful.core.base.forks import new_lock


class Report:
    """Counts the calls of torch's attention while heedful is active.

    ours: calls that heedful ran, by name. declined: calls that torch ran, by the reason why heedful
    did not. A call that torch.compile traces counts once, when it is traced.
    """

    def __init__(self):
        self.ours: Counter[str] = Counter()
        self.declined: Counter[str] = Counter()
        # An increment takes two steps, and threads share a report.
        self._lock = new_lock()

    def count(self, name: str) -> None:
        """One more call that heedful ran."""
        with self._lock:
            self.ours[name] += 1

    def decline(self, reason: str) -> None:
        """One more call that torch ran, and why."""
        with self._lock:
            self.declined[reason] += 1

    def __str__(self) -> str:
        with self._lock:
            rows = [("heedful", *row) for row in self.ours.most_common()]
            rows += [("torch", *row) for row in self.declined.most_common()]
        return "\n".join([f"{where:8}{count:8}  {what}" for where, what, count in rows])
