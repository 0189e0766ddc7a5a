"""How far a run is: a bar on a terminal, a line now and then in a log file."""

import sys

from tqdm import tqdm

LINES = 10  # in the log of a whole run


class Progress:
    """Steps of a training run, shown on standard error; a context manager."""

    def __init__(self, steps: int, shown: bool):
        self.steps, self.shown, self.done = steps, shown, 0
        self._bar = tqdm(total=steps, unit="step", file=sys.stderr, disable=not (shown and sys.stderr.isatty()))

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error) -> None:
        self._bar.close()

    def step(self, loss: float, tokens_per_second: float) -> None:
        """One more step is done."""
        self.done += 1
        state = f"loss {loss:.4f}, {tokens_per_second:.0f} tokens/s"
        self._bar.update()
        self._bar.set_postfix_str(state)
        due = self.done * LINES // self.steps > (self.done - 1) * LINES // self.steps
        if self._bar.disable and due:
            self.say(f"step {self.done} of {self.steps}: {state}")

    def say(self, sentence: str) -> None:
        """A line above the bar."""
        if self.shown:
            tqdm.write(sentence, file=sys.stderr)
            sys.stderr.flush()
