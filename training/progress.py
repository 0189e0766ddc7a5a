"""How far a run is: a bar on a terminal, a line now and then in a log file."""

import sys
import time

from tqdm import tqdm

LINES = 10  # in the log of a whole run


class Progress:
    """Steps of a training run, shown on standard error; a context manager."""

    def __init__(self, steps: int, shown: bool, done: int = 0):
        self.steps, self.shown, self.done = steps, shown, done
        self._began, self._first = time.monotonic(), done
        self._bar = tqdm(
            total=steps, initial=done, unit="step", file=sys.stderr, disable=not (shown and sys.stderr.isatty())
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error) -> None:
        self._bar.close()

    def step(self, loss: float | None, tokens_per_second: float, mfu: float | None = None) -> None:
        """One more step is done; loss None: it was skipped."""
        self.done += 1
        state = f"loss {loss:.4f}" if loss is not None else "skipped"
        state += f", {tokens_per_second:.0f} tokens/s" + (f", MFU {mfu:.1%}" if mfu is not None else "")
        self._bar.update()
        self._bar.set_postfix_str(state)
        due = self.done * LINES // self.steps > (self.done - 1) * LINES // self.steps
        if self._bar.disable and due:
            left = (time.monotonic() - self._began) / (self.done - self._first) * (self.steps - self.done)
            self.say(f"step {self.done} of {self.steps}: {state}, {tqdm.format_interval(left)} left")

    def say(self, sentence: str) -> None:
        """A line above the bar."""
        if self.shown:
            tqdm.write(sentence, file=sys.stderr)
            sys.stderr.flush()
