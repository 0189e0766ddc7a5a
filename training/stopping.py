"""Being told to stop: a signal sets a flag, the processes agree on it between steps, and none leaves alone.

Job schedulers send SIGTERM, or SIGUSR1 some time before (Slurm: `--signal=TERM@120`). The second signal ends the
process at once.
"""

import os
import signal
import threading
from types import FrameType

import torch
from accelerate import Accelerator

from transformer2.errors import UserError

SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]
EXIT_CODE = 143  # 128 + SIGTERM, as a shell reports it


class Preempted(UserError):
    """The run was told to stop, has saved its state, and can go on; no failure, but not finished either."""

    exit_code = EXIT_CODE


class Stopping:
    """Listens while it is entered; only the main thread of a process can."""

    def __init__(self, accelerator: Accelerator):
        self.accelerator, self.asked = accelerator, False
        self._before: dict[int, object] = {}

    def __enter__(self) -> "Stopping":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *error) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            os._exit(EXIT_CODE)
        self.asked = True

    def agreed(self, save_now: bool = False) -> tuple[bool, bool]:
        """(whether any process was asked to stop, whether any wants a checkpoint); the same answer in all of them."""
        if self.accelerator.num_processes == 1:
            return self.asked, save_now
        wishes = torch.tensor([float(self.asked), float(save_now)], device=self.accelerator.device)
        stop, save = self.accelerator.reduce(wishes, reduction="sum").tolist()
        return stop > 0, save > 0
