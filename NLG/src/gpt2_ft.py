"""Trains GPT-2 on encoded examples: its LoRA part or, without --lora_dim, all of it.

    python -m torch.distributed.launch --nproc_per_node=1 src/gpt2_ft.py --platform local \\
        --train_data data/e2e/train.jsonl --valid_data data/e2e/valid.jsonl …

A step is one batch. Into --work_dir go

    model.<step>.pt    LoRA's part every --save_interval steps and after each epoch, the whole
                       model after the last one (without LoRA, the whole model always)
    metrics.jsonl      a line every --log_interval steps, and one for each evaluation
    resume.pt          what --resume goes on from
    runs/              the same figures for TensorBoard, where that is installed
"""

import argparse
import hashlib
import logging
import math
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm.auto import tqdm

import loralib as lora
from checkpoints import (
    add_model_params,
    damaged_resume,
    open_model,
    read_resume,
    remove_resume,
    save_model,
    write_resume,
)
from data_utils import FT_Dataset, batches_per_epoch, training_batches, validation_batches
from exp_utils import MetricsLog, run, set_up_logging
from gpu import Run, add_gpu_params, distributed_mean, distributed_sync, gather_objects, start
from loralib.errors import CheckpointError, TrainingError
from loralib.io.atomic import remove_leftovers
from loralib.io.likeness import check_like
from loralib.training import distributed
from loralib.training.locks import sole_use
from loralib.training.precision import ApexPrecision, Precision, has_apex, hold_frozen_in
from loralib.training.process import rng_state, set_rng_state, set_seed, set_up_device
from optimizer import add_optimizer_params, create_adam_optimizer, create_optimizer_scheduler

logger = logging.getLogger(__name__)

# What decides the bits that a run ends with: a resumed run has to have the same.
_SAME_IN_A_RUN = (
    *("model_card", "lora_dim", "lora_alpha", "lora_dropout", "obj", "seq_len", "label_smooth"),
    *("train_batch_size", "grad_acc", "clip", "fp16", "bf16", "tf32", "random_seed"),
    *("lr", "weight_decay", "correct_bias", "adam_epislon", "no_decay_bias"),
    *("adam_beta1", "adam_beta2", "scheduler", "warmup_step", "i_steps", "i_lrs"),
)


_MANY = 2**62
_RANGES = {
    **dict.fromkeys(("grad_acc", "log_interval", "eval_interval", "save_interval"), (1, _MANY)),
    **dict.fromkeys(("max_step", "max_epoch"), (1, _MANY)),
    **dict.fromkeys(("lora_dropout", "label_smooth"), (0, 1)),
    **dict.fromkeys(("clip", "lora_alpha"), (0, 1e30)),
    "random_seed": (0, _MANY),
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line.

    Raises:
        ValueError: a number is out of its range.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument_group("data and training").add_argument
    add("--train_data", required=True, help="examples as gpt2_encode.py writes them")
    add("--valid_data", required=True, help="the same, to evaluate on")
    add("--train_batch_size", type=int, default=8, help="examples a step, in each process")
    add("--valid_batch_size", type=int, default=4, help="examples evaluated at a time")
    add("--grad_acc", type=int, default=1, help="steps whose gradients make one update")
    add("--clip", type=float, default=0.0, help="largest norm of an update's gradient; 0: any")
    add("--seq_len", type=int, default=512, help="longer examples are cut to so many tokens")
    add("--obj", default="clm", choices=["jlm", "clm"], help="learn completions, or contexts too")
    add("--lora_dropout", type=float, default=0.0, help="dropout on the input of LoRA's update")
    add("--label_smooth", type=float, default=0.0, help="probability spread over the vocabulary")
    half = parser.add_mutually_exclusive_group().add_argument
    half("--fp16", action="store_true", help="half precision, with apex O1 where that works (GPU)")
    half("--bf16", action="store_true", help="bfloat16; frozen weights are held in it")
    add("--tf32", action="store_true", help="compute float32 in TensorFloat-32 (GPU)")
    add(
        "--use_deterministic_algorithms",
        action="store_true",
        help="PyTorch's deterministic mode: the same bits on a GPU as well",
    )
    add = parser.add_argument_group("output").add_argument
    add(
        "--work_dir",
        default=os.environ.get("PT_OUTPUT_DIR", "gpt2_model"),
        help="folder for all that is written; default: $PT_OUTPUT_DIR, or gpt2_model",
    )
    add("--log_interval", type=int, default=100, help="steps between logged losses")
    add("--eval_interval", type=int, default=2000, help="steps between evaluations")
    add("--save_interval", type=int, default=500, help="steps between checkpoints")
    add("--save_lora_only", action="store_true", help="LoRA's part at the very end, too")
    add("--resume", action="store_true", help="go on with the run in --work_dir that was killed")
    add_model_params(parser)
    add_optimizer_params(parser)
    add_gpu_params(parser)
    add = parser.add_argument_group(
        "accepted as in the release, where they have no effect"
    ).add_argument
    add("--roll_interval", type=int, default=-1)
    add("--roll_lr", type=float, default=0.00001)
    add("--roll_step", type=int, default=100)
    add("--eval_epoch", type=int, default=1)
    args = parser.parse_args(argv)
    for flag, (least, most) in _RANGES.items():
        value = getattr(args, flag)
        if value is not None and not least <= value <= most:
            bound = f"at most {most:g}" if value > most else f"at least {least:g}"
            raise ValueError(f"--{flag} has to be {bound}, but is {value}")
    return args


class Trainer:
    """One run: the loop, what it writes, and where it stands.

    Args:
        args: the flags.
        this: this process among those of the run.
    """

    def __init__(self, args: argparse.Namespace, this: Run):
        self.args, self.this = args, this
        self.work_dir = Path(args.work_dir)
        resumed = self._what_to_resume()
        self.train_data = FT_Dataset(
            args.train_data,
            args.train_batch_size,
            args.seq_len,
            args.obj == "jlm",
            args.random_seed,
        )
        self.valid_data = FT_Dataset(
            args.valid_data,
            args.valid_batch_size,
            args.seq_len,
            args.obj == "jlm",
            args.random_seed,
        )
        self.epoch_batches = batches_per_epoch(self.train_data, this)
        self._build_model()
        self._settle_length()
        self.optimizer = create_adam_optimizer(self.model, args)
        self.scheduler = create_optimizer_scheduler(self.optimizer, args)
        self.identity = self._identity()
        self.precision = self._make_precision()
        self.wrapped = self._wrap()
        if self.wrapped is not self.model:
            self._warm_up()
        self.step = self.epoch = self.batches_done = 0  # batches_done: of the current epoch
        self.best_ppl = math.inf
        self.resume_is_due = False
        self.metrics = MetricsLog(self.work_dir) if this.is_main else None
        self.is_finished = False
        if resumed is not None:
            self._resume(resumed)
        else:
            self._begin()

    # ---- building ----

    def _build_model(self) -> None:
        args = self.args
        set_seed(args.random_seed)
        self.model, self.base = open_model(args, lora_dropout=args.lora_dropout)
        if args.seq_len > self.model.config.n_positions:
            raise ValueError(
                f"--seq_len {args.seq_len}: the model has {self.model.config.n_positions} positions"
            )
        if args.lora_dim > 0:
            if args.init_checkpoint is None:
                raise ValueError("--lora_dim needs a trained base: give it as --init_checkpoint")
            lora.mark_only_lora_as_trainable(self.model)
        else:
            if args.save_lora_only:
                raise ValueError("--save_lora_only needs LoRA: add --lora_dim")
            # They share their memory with the base's file.
            for parameter in self.model.parameters():
                parameter.data = parameter.data.clone()
        self.model.to(self.this.device)
        # Every process draws a dropout of its own.
        torch.manual_seed(args.random_seed + self.this.rank)

    def _settle_length(self) -> None:
        args = self.args
        if args.max_step is None and args.max_epoch is not None:
            batches = self.train_data.num_batches
            args.max_step = math.ceil(args.max_epoch * batches / self.this.world_size)

    def _make_precision(self) -> Precision:
        args, kind = self.args, self.this.device.type
        if args.fp16 and kind != "cuda":
            raise ValueError("--fp16 needs a GPU; --bf16 works on a CPU as well")
        if args.fp16 and has_apex():
            return ApexPrecision(self.model, self.optimizer)
        dtype = torch.float32
        if args.fp16 or args.bf16:
            dtype = torch.float16 if args.fp16 else torch.bfloat16
            hold_frozen_in(self.model, dtype)
        return Precision(dtype, kind)

    def _wrap(self) -> nn.Module:
        if self.this.world_size == 1:
            return self.model
        devices = [self.this.device] if self.this.device.type == "cuda" else None
        # All processes have read the same base and drawn from the same seed.
        return DistributedDataParallel(self.model, device_ids=devices, init_sync=False)

    def _warm_up(self) -> None:
        """Lets DDP lay out the gradients; see `loralib.training.distributed.warm_up_ddp`."""
        token = torch.zeros(1, 1, dtype=torch.int64)
        batch = {"input": token, "target": token, "mask": torch.ones(1, 1)}
        distributed.warm_up_ddp(self.model, lambda: self._loss(self.wrapped, batch, 0.0).backward())

    # ---- the loop ----

    def train(self) -> None:
        """Runs to the last step of the last epoch."""
        last = self.scheduler.max_step
        epochs = self.args.max_epoch
        self.model.train()
        self.tokens, self.since = 0, time.perf_counter()
        with tqdm(
            total=min(last, epochs * self.epoch_batches if epochs else last),
            initial=self.step,
            unit="step",
            disable=not self.this.is_main or None,  # None: where there is no terminal
        ) as self.bar:
            while not self._is_over():
                self._train_epoch()
        self._save(last=True)

    def _is_over(self) -> bool:
        epochs = self.args.max_epoch
        return self.step >= self.scheduler.max_step or (epochs is not None and self.epoch >= epochs)

    def _train_epoch(self) -> None:
        args = self.args
        pin = self.this.device.type == "cuda"
        batches = training_batches(
            self.train_data, self.this, args.random_seed, self.epoch + 1, self.batches_done, pin
        )
        for batch in batches:
            loss = self._train_step(batch)
            self.batches_done += 1
            self.bar.update()
            if self.step % args.log_interval == 0:
                self._log_step(loss)
            if self.step % args.eval_interval == 0:
                self._evaluate()
            if self.step % args.save_interval == 0:
                self._save()
            if self.resume_is_due and self.step % args.grad_acc == 0:
                self._write_resume()
            if self.step >= self.scheduler.max_step:
                break
        self.epoch, self.batches_done = self.epoch + 1, 0
        if not self._is_over():
            self._save()

    def _train_step(self, batch: dict[str, Tensor]) -> float:
        """Forward, backward and, at the end of an accumulation, an update; returns the loss."""
        args = self.args
        self.scheduler.step()
        updates = (self.step + 1) % args.grad_acc == 0
        together = updates or self.wrapped is self.model
        with nullcontext() if together else self.wrapped.no_sync():
            loss = self._loss(self.wrapped, batch, args.label_smooth)
            self.precision.backward(loss / args.grad_acc)
        value = loss.item()
        if not math.isfinite(value):
            raise TrainingError(
                f"the loss of step {self.step + 1} is {value} at learning rate "
                f"{self.scheduler.lr:.3g}: nothing is saved of it; try a lower --lr"
            )
        if updates:
            parameters = (p for group in self.optimizer.param_groups for p in group["params"])
            self.precision.step(self.optimizer, list(parameters), args.clip)
            self.optimizer.zero_grad()
        self.step += 1
        distributed.beat()
        self.tokens += int(batch["mask"].flip(1).cumsum(1).count_nonzero())
        return value

    def _loss(self, model: nn.Module, batch: dict[str, Tensor], label_smooth: float) -> Tensor:
        device = self.this.device
        input_ids, labels, mask = (
            batch[name].to(device, non_blocking=True) for name in ("input", "target", "mask")
        )
        with self.precision.autocast():
            return model(input_ids, labels, mask, label_smooth)

    def _log_step(self, loss: float) -> None:
        if not self.this.is_main:
            return
        now = time.perf_counter()
        speed = self.tokens / (now - self.since)
        self.tokens, self.since = 0, now
        self.bar.set_postfix(loss=f"{loss:.3f}", lr=f"{self.scheduler.lr:.2e}")
        if self.bar.disable:
            logger.info("step %d: loss %.3f, lr %.2e", self.step, loss, self.scheduler.lr)
        self.metrics.write(step=self.step, loss=loss, lr=self.scheduler.lr, tokens_per_second=speed)

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Mean loss of the validation data's targets, and what it is as a perplexity."""
        begun = time.perf_counter()
        self.model.eval()
        total = torch.zeros(2, dtype=torch.float64)
        for batch in validation_batches(self.valid_data, self.this):
            count = float(batch["mask"].sum())
            mean = self._loss(self.model, batch, 0.0).item()
            total += torch.tensor([mean * (count + 0.0001), count], dtype=torch.float64)
            distributed.beat()
        self.model.train()
        loss, count = distributed_mean(self.this, total).tolist()
        valid_loss = loss / count
        if not math.isfinite(valid_loss):
            raise TrainingError(f"the validation loss after step {self.step} is {valid_loss}")
        ppl = math.exp(min(valid_loss, 700))  # beyond, it is no floating-point number
        self.best_ppl = min(self.best_ppl, ppl)
        if self.this.is_main:
            logger.info(
                "step %d: valid_loss %.4f, valid_ppl %.3f, best_ppl %.3f",
                *(self.step, valid_loss, ppl, self.best_ppl),
            )
            self.metrics.write(
                step=self.step, valid_loss=valid_loss, valid_ppl=ppl, best_ppl=self.best_ppl
            )
        self.since += time.perf_counter() - begun  # evaluation is no part of training's speed

    # ---- what is kept ----

    def _save(self, last: bool = False) -> None:
        """Writes ``model.<step>.pt``, and what to resume from as soon as no gradient is held."""
        args = self.args
        lora_only = args.lora_dim > 0 and (args.save_lora_only or not last)
        if self.this.is_main:
            path = self.work_dir / f"model.{self.step}.pt"
            save_model(path, self.model, self.base, lora_only)
            logger.info("wrote %s", path)
        if last or self.step % args.grad_acc == 0:
            self._write_resume(finished=last)
        else:
            self.resume_is_due = True
        distributed_sync(self.this)

    def _write_resume(self, finished: bool = False) -> None:
        """A finished run keeps its mark only, so that --resume does not begin it anew."""
        self.resume_is_due = False
        chance = gather_objects(self.this, rng_state(self.this.device))
        if not self.this.is_main:
            return
        state: dict[str, Any] = {"run": self.identity, "step": self.step, "finished": finished}
        if not finished:
            state |= {
                "epoch": self.epoch,
                "batches_done": self.batches_done,
                "best_ppl": self.best_ppl,
                "trained": {n: p for n, p in self.model.named_parameters() if p.requires_grad},
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "precision": self.precision.state_dict(),
                "chance": chance,
            }
        write_resume(self.work_dir, state)

    def _identity(self) -> dict[str, Any]:
        """What has to be the same for a run to resume bit-exact."""
        settings = {f"--{name}": getattr(self.args, name) for name in _SAME_IN_A_RUN}
        return {
            **settings,
            "number of processes": self.this.world_size,
            "last step": self.scheduler.max_step,
            "training data": hashlib.sha256(Path(self.args.train_data).read_bytes()).hexdigest(),
            "base": self.base.fingerprint,
        }

    def _what_to_resume(self) -> dict[str, Any] | None:
        """The state in the work folder, if it is asked for; an unfinished run is not overwritten.

        Raises:
            CheckpointError: there is an unfinished run, and --resume is not given.
        """
        state = read_resume(self.work_dir)
        if self.args.resume:
            if state is None:
                logger.warning("%s holds no run to resume: beginning one", self.work_dir)
            return state
        if state is not None and not state["finished"]:
            raise CheckpointError(
                f"{self.work_dir}: holds a run that ended at step {state['step']}: go on with it "
                "by --resume, or remove its resume.pt, or give another --work_dir"
            )
        return None

    def _begin(self) -> None:
        """Makes sure that this run's files are taken for no other's.

        Raises:
            CheckpointError: there are models of another run.
        """
        distributed_sync(self.this)  # all have looked for a run to resume
        if not self.this.is_main:
            return
        # With --resume they are this run's, killed before it had written what to go on from.
        if not self.args.resume and any(self.work_dir.glob("model.*.pt")):
            raise CheckpointError(
                f"{self.work_dir}: holds models of another run, which would be mixed up with this "
                "one's: remove them, or give another --work_dir"
            )
        remove_resume(self.work_dir)
        self.metrics.begin(after_step=0)

    def _resume(self, state: dict[str, Any]) -> None:
        """Puts everything where it was."""
        for name, now in self.identity.items():
            was = state["run"].get(name)
            if was != now:
                raise CheckpointError(
                    f"{self.work_dir}: is a run with {name} {was}, not {now}: give the same "
                    "to resume it, or begin anew in another --work_dir"
                )
        self.step = state["step"]
        self.is_finished = state["finished"]
        if self.is_finished:
            return
        try:
            self._load_state(state)
        except Exception as error:  # whatever a damaged state leads to
            raise damaged_resume(self.work_dir, error) from error
        if self.this.is_main:
            self.metrics.begin(after_step=self.step)
        logger.info("resuming after step %d", self.step)

    def _load_state(self, state: dict[str, Any]) -> None:
        """Puts model, optimizer, schedule and generators where they were."""
        parameters = self.model.named_parameters()
        trained = {name: p.detach().cpu() for name, p in parameters if p.requires_grad}
        # A GPU's generator is told apart when it is set.
        rng_states = [rng_state(torch.device("cpu"))] * self.this.world_size
        example = {"epoch": 0, "batches_done": 0, "best_ppl": 0.0, "trained": trained}
        example |= {"scheduler": self.scheduler.state_dict(), "chance": rng_states}
        check_like(state, {**example, "optimizer": {}, "precision": self.precision.state_dict()})
        self.epoch, self.batches_done = state["epoch"], state["batches_done"]
        self.best_ppl = state["best_ppl"]
        with torch.no_grad():
            for name, tensor in state["trained"].items():
                self.model.get_parameter(name).copy_(tensor)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.precision.load_state_dict(state["precision"])
        set_rng_state(state["chance"][self.this.rank], self.this.device)


def main(argv: list[str] | None = None) -> None:
    """Trains as the command line says."""
    args = parse_args(argv)
    this = start(args)
    set_up_device(tf32=args.tf32, deterministic=args.use_deterministic_algorithms)
    set_up_logging()
    if not this.is_main:
        distributed_sync(this)
        return train(args, this)
    Path(args.work_dir).mkdir(parents=True, exist_ok=True)
    with sole_use(args.work_dir):
        for name in ("model.*.pt", "resume.pt", "metrics.jsonl"):
            remove_leftovers(args.work_dir, name)
        distributed_sync(this)
        train(args, this)


def train(args: argparse.Namespace, this: Run) -> None:
    """Builds the run, and runs what is left of it."""
    distributed.check_shared(args.work_dir, this.world_size)
    launch = distributed.find_launch(args.work_dir, this.world_size)
    args.resume |= launch.is_restart  # by the launcher, which gives the first attempt's command
    trainer = Trainer(args, this)
    if this.is_main:
        launch.begin()
    if trainer.is_finished:
        logger.info("%s: this run is finished", args.work_dir)
        return
    trainer.train()


if __name__ == "__main__":
    run(main)
