"""gpt2_ft.py with a model of milliseconds in place of the smallest card, for several processes.

    torchrun … tiny_gpt2_ft.py calls.json

The file lists runs, one after the other: the script's arguments as "argv", and as "kill_in_step",
where that is not null, the step in which process 1 is killed. It has also "more", arguments that
process 1 is given alone, and "draws" as the seed by which it initializes, where these are there.
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
    """Dies as a step begins, in process 1."""

    kill_in_step: int | None = None

    def step(self):
        if self.state_dict()["step"] + 1 == self.kill_in_step and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        super().step()


def main(argv: list[str] | None = None) -> None:
    sys.modules["tensorboard"] = sys.modules["matplotlib"] = None  # which take seconds to start
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
