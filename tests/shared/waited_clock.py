"""A clock that only waiting moves, in place of the module `time` of the code under test."""


class WaitedClock:
    """While a caller sleeps, what is due by then is done, as by another process or thread."""

    def __init__(self, now_s=100.0):
        self.now_s = now_s
        self.due = []

    def monotonic(self):
        """Return the time in seconds."""
        return self.now_s

    def sleep(self, seconds):
        """Move the time, and do what is due."""
        self.now_s += seconds
        for at_s, deed in self.due[:]:
            if at_s <= self.now_s:
                self.due.remove((at_s, deed))
                deed()

    def after(self, seconds, deed):
        """Call `deed` once the time has moved by `seconds`."""
        self.due.append((self.now_s + seconds, deed))
