"""What was used in the last so many seconds, in bounded memory; it knows no blocks."""

from collections import deque

NUM_SLICES = 60


class SlidingSum:
    """A sum over the last `window` seconds, kept in slices.

    A slice leaves as a whole once all of it is older than the window, so the sum may reach back
    by one slice, a sixtieth of the window, too far, and never too short.
    """

    def __init__(self, window: float) -> None:
        assert window > 0
        self._width = window / NUM_SLICES
        self._slices: deque[tuple[int, float]] = deque()
        """(number, amount), in order of time; slices in which nothing was used are left out."""

    def add(self, start: float, end: float, rate: float) -> None:
        """Adds `rate` per second over [start, end), which begins where the last one ended."""
        if not rate or end <= start:
            return
        first, last = int(start // self._width), int(end // self._width)
        # What is older than the window counts no more: a long silence costs no long loop.
        first = max(first, last - NUM_SLICES)
        for number in range(first, last + 1):
            left = max(start, number * self._width)
            right = min(end, (number + 1) * self._width)
            self._put(number, rate * max(0.0, right - left))
        self._drop(last)

    def total(self, now: float) -> float:
        """Sums what still counts."""
        self._drop(int(now // self._width))
        return sum(amount for _, amount in self._slices)

    def wait_until_below(self, limit: float, now: float, rate: float) -> float | None:
        """Finds the seconds until the sum is below a limit if use goes on at a rate.

        Returns:
            Seconds; 0 when it is below already, None when it never will be at this rate.
        """
        left = self.total(now)
        if left < limit:
            return 0.0
        number = int(now // self._width)
        for boundary in range(number + 1, number + NUM_SLICES + 2):
            seconds = boundary * self._width - now
            still = sum(amount for n, amount in self._slices if n >= boundary - NUM_SLICES)
            if still + rate * seconds < limit:
                return seconds
        return None

    def _put(self, number: int, amount: float) -> None:
        if self._slices and self._slices[-1][0] == number:
            amount += self._slices.pop()[1]
        self._slices.append((number, amount))

    def _drop(self, number: int) -> None:
        while self._slices and self._slices[0][0] < number - NUM_SLICES:
            self._slices.popleft()
