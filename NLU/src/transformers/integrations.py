"""Where logs can go besides the console: TensorBoard and Weights & Biases, where installed."""

import importlib.util
from numbers import Real

from .modeling_utils import PreTrainedModel
from .trainer_callback import TrainerCallback
from .training_args import TrainingArguments


def is_tensorboard_available() -> bool:
    """Whether TensorBoard is installed."""
    return importlib.util.find_spec("tensorboard") is not None


def is_wandb_available() -> bool:
    """Whether Weights & Biases is installed."""
    return importlib.util.find_spec("wandb") is not None


def _named(logs: dict[str, float]) -> dict[str, float]:
    """``eval_loss`` -> ``eval/loss``, ``loss`` -> ``train/loss``; numbers only."""
    named = {}
    for name, value in logs.items():
        if isinstance(value, Real):
            evaluated = name.startswith("eval_")
            named[f"{'eval' if evaluated else 'train'}/{name.removeprefix('eval_')}"] = float(value)
    return named


class TensorBoardCallback(TrainerCallback):
    """Writes logs to ``args.logging_dir``."""

    def __init__(self) -> None:
        self.writer = None

    def on_log(
        self, args, state, control, model=None, logs: dict[str, float] | None = None, **kwargs
    ) -> None:
        """Adds a record; the first one opens the file. Evaluations may come after training."""
        if not state.is_world_process_zero:
            return
        if self.writer is None:
            self._open(args, model)
        for name, value in _named(logs or {}).items():
            self.writer.add_scalar(name, value, state.global_step)
        self.writer.flush()

    def _open(self, args: TrainingArguments, model) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(log_dir=args.logging_dir)
        self.writer.add_text("args", args.to_json_string())
        if isinstance(model, PreTrainedModel):
            self.writer.add_text("model_config", model.config.to_json_string())


class WandbCallback(TrainerCallback):
    """Sends logs to Weights & Biases."""

    def __init__(self) -> None:
        self.run = None

    def on_log(
        self, args, state, control, model=None, logs: dict[str, float] | None = None, **kwargs
    ) -> None:
        """Sends a record; the first one starts a run of the name ``--run_name``."""
        if not state.is_world_process_zero:
            return
        if self.run is None:
            import wandb

            settings = args.to_dict()
            if isinstance(model, PreTrainedModel):
                settings |= model.config.to_dict()
            self.run = wandb.init(name=args.run_name, config=settings)
        self.run.log(_named(logs or {}), step=state.global_step)


_REPORTERS = {
    "tensorboard": (is_tensorboard_available, TensorBoardCallback),
    "wandb": (is_wandb_available, WandbCallback),
}


def reporting_callbacks(args: TrainingArguments) -> list[type[TrainerCallback]]:
    """The callbacks that ``--report_to`` asks for.

    Raises:
        ValueError: one is asked for by name and is not installed.
    """
    asked = ["all"] if args.report_to is None else args.report_to
    if "none" in asked:
        return []
    callbacks = []
    for name, (is_available, callback) in _REPORTERS.items():
        if name in asked and not is_available():
            raise ValueError(f"--report_to {name}: it is not installed (pip install {name})")
        if is_available() and (name in asked or "all" in asked):
            callbacks.append(callback)
    return callbacks
