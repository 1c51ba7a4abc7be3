"""gpt2_ft.py with a tiny model in place of every model card, for several processes.

    torchrun … tiny_gpt2_ft.py calls.json

The file is a list of successive runs. Of each, "argv" has the script's arguments, and
"kill_in_step" the step in which process 1 is killed, or null. Optionally, "more" has arguments for
process 1 only, and "draws" the seed of its initialization.
"""

import json
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "NLG" / "src"))

import checkpoints
import gpt2_ft
import optimizer
from model import GPT2Config
from optimizer import Scheduler
from script import run


def tiny_config_of(card: str, **lora_fields) -> GPT2Config:
    """The configuration for any model card."""
    return GPT2Config(16, 2, 2, vocab_size=300, n_positions=32, **lora_fields)


class Killed(Scheduler):
    """A scheduler that kills process 1 as a step begins."""

    kill_in_step: int | None = None

    def step(self):
        if self.state_dict()["step"] + 1 == self.kill_in_step and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        super().step()


def main(argv: list[str] | None = None) -> None:
    sys.modules["tensorboard"] = sys.modules["matplotlib"] = None  # which take seconds to import
    checkpoints.config_of = tiny_config_of
    optimizer.Scheduler = Killed
    set_seed = gpt2_ft.set_seed
    for call in json.loads(Path((argv or sys.argv)[-1]).read_text()):
        Killed.kill_in_step = call["kill_in_step"]
        is_other = os.environ.get("RANK") == "1"
        draws = call.get("draws") if is_other else None
        gpt2_ft.set_seed = set_seed if draws is None else lambda _, seed=draws: set_seed(seed)
        gpt2_ft.main([*call["argv"], *(call.get("more", ()) if is_other else ())])


if __name__ == "__main__":
    run(main)
