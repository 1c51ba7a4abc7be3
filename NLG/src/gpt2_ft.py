"""Trains GPT-2 on encoded examples: LoRA only or, without LoRA's flags, the whole model.

    python -m torch.distributed.launch --nproc_per_node=1 src/gpt2_ft.py --platform local \\
        --train_data data/e2e/train.jsonl --valid_data data/e2e/valid.jsonl …

A step is one batch. These files are written to --work_dir:

    model.<step>.pt    LoRA's tensors every --save_interval steps and after each epoch, the full
                       model after the last one (without LoRA, always the full model)
    metrics.jsonl      one line every --log_interval steps, and one for each evaluation
    resume.pt          the state that --resume resumes from
    runs/              the same figures for TensorBoard; see --report_to
    learning_curves.png    the same figures as a picture, at the end of the run
"""

import argparse
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from loralib.training.process import begin

    begin()

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from tqdm.auto import tqdm

import loralib as lora
import script
from checkpoints import Base, config_of_flags, open_model, save_model
from data_utils import (
    Batch,
    FT_Dataset,
    Row,
    batches_from,
    batches_per_epoch,
    collate,
    count_tokens,
    short_batch,
    training_order,
    validation_batches,
)
from gpt2_ft_arguments import check_fits, parse_args
from gpu import DistEnv, check_same_flags, start
from loralib.adapters.summary import lora_in_words, trained_in_words
from loralib.errors import TrainingError
from loralib.io.console import Pace, devices_in_words, steps_in_words, table, training_in_words
from loralib.text import counted
from loralib.training import watch
from loralib.training.agreement import check_same_weights
from loralib.training.compiled import compile_layers
from loralib.training.cuda_graphs import (
    HINT,
    IN_USE,
    FillingCollator,
    GraphedStep,
    are_default,
    uses_graphs,
    why_no_graphs,
)
from loralib.training.ddp import sync_gradients, warm_up_ddp, wrap_ddp
from loralib.training.determinism import set_dropout_seed, set_seed, set_up_device
from loralib.training.distributed import share_tensors, share_warnings, sum_over_processes
from loralib.training.estimate import Estimate, Plan, estimate, notable_batches, rate_of
from loralib.training.losses import PendingLosses
from loralib.training.output import output_folder
from loralib.training.precision import (
    Precision,
    cast_frozen,
    check_precision,
    compute_dtype,
    estimate_precision,
)
from loralib.training.product_choices import choose_products, frozen_weights
from loralib.training.restarts import find_launch
from loralib.training.resume import Stateful
from loralib.training.step_cost import Training
from metrics_log import MetricsLog
from model import GPT2LMModel
from optimizer import (
    Scheduler,
    create_adam_optimizer,
    create_optimizer_scheduler,
    end_of_schedule,
)
from run_state import (
    RESUME_NAME,
    Progress,
    begin_run,
    check_same_start,
    find_run,
    had_graphs,
    identity_of,
    restore_run,
    write_finished,
    write_run,
)
from weights import own_tensors

logger = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> None:
    """Trains as the command line says."""
    args = parse_args(argv, __doc__)
    dist_env = start(args)
    # Logging depends on RANK, which `start` may have set.
    script.set_up_logging(args.log_level)
    # Whether a run resumes depends on its folder as well, so `check_same_start` compares that.
    check_same_flags(args, dist_env, but=["resume"])
    set_up_device(tf32=args.tf32, deterministic=args.use_deterministic_algorithms)
    if args.estimate:
        taken = estimate_run(args, dist_env)
        if dist_env.is_main:
            print(taken)
        return
    with output_folder(args.work_dir, dist_env.rank, dist_env.world_size):
        train(args, dist_env)


@dataclass(frozen=True)
class Run:
    """The objects of a run that stay the same from its first step to its last.

    Attributes:
        args: the flags.
        dist_env: this process.
        train_data, valid_data: the examples to train on and to evaluate on.
        model: the model that is trained.
        base: the weights that it started from.
        optimizer, scheduler, precision: how the model is trained.
        epoch_steps, last_step: the number of steps per epoch, and the run's last step.
        identity: the settings that must not change when the run is resumed, see `identity_of`.
        loss_of: computes a batch's loss, see `loss_function`.
    """

    args: argparse.Namespace
    dist_env: DistEnv
    train_data: FT_Dataset
    valid_data: FT_Dataset
    model: GPT2LMModel
    base: Base
    optimizer: Optimizer
    scheduler: Scheduler
    precision: Precision
    epoch_steps: int
    last_step: int
    identity: dict[str, Any]
    loss_of: Callable[..., Tensor]

    @property
    def work_dir(self) -> Path:
        """The folder to which all files are written."""
        return Path(self.args.work_dir)

    @property
    def parts(self) -> dict[str, Stateful]:
        """The objects besides the model whose state is saved, by name."""
        names = ("optimizer", "scheduler", "precision")
        return {name: getattr(self, name) for name in names}


def train(args: argparse.Namespace, dist_env: DistEnv) -> None:
    """Carries out a run, from reading its data to its last checkpoint."""
    begun = time.perf_counter()
    check_precision(args.fp16, args.bf16, dist_env.device)
    work_dir = Path(args.work_dir)
    launch = find_launch(work_dir, dist_env.world_size)
    args.resume |= launch.is_restart  # the launcher repeats the first attempt's command
    resumed = find_run(work_dir, args.resume)
    args.cuda_graphs = uses_graphs(
        args.cuda_graphs,
        before=None if resumed is None else had_graphs(resumed),
        reason=why_no_graphs(dist_env.device, args.torch_compile),
        by_default=are_default(dist_env.world_size),
    )

    run = build_run(args, dist_env, *read_data(args, dist_env), new_lora=resumed is None)
    check_same_start(args, dist_env, run.identity, resumed)
    agree_on_weights(run.model, run.base.tensors, dist_env.world_size)
    ddp_model = set_up_model(run)
    progress = Progress()
    if resumed is None:
        begin_run(args, dist_env, run.identity)
    else:
        progress = restore_run(work_dir, dist_env, run.identity, resumed, run.model, run.parts)
    if dist_env.is_main:
        launch.begin()
    if resumed is not None and resumed["finished"]:
        logger.info("%s: this run is finished", work_dir)
        return

    metrics = MetricsLog(work_dir, progress.step, dist_env.is_main, args.report_to)
    share_warnings(dist_env.rank, dist_env.world_size)
    if dist_env.is_main:
        warn_of_rate(args)
        show_beginning(run, progress.step)
    resumed_from = progress.step
    best_ppl = take_steps(run, ddp_model, progress, metrics)
    write_model(run, run.last_step, lora_only=args.save_lora_only)
    curves = metrics.draw()  # before the run counts as finished, since --resume then does nothing
    metrics.sync()
    write_finished(work_dir, dist_env, run.identity, run.last_step)
    share_warnings(dist_env.rank, dist_env.world_size)
    if dist_env.is_main:
        show_end(run, resumed_from, best_ppl, begun, curves)


def read_data(args: argparse.Namespace, dist_env: DistEnv) -> tuple[FT_Dataset, FT_Dataset]:
    """Reads the examples to train on, and those to evaluate on."""
    train_data = read_training_data(args)
    # A model is always evaluated on completions only, whatever --obj is.
    valid_data = FT_Dataset(
        args.valid_data, args.valid_batch_size, args.seq_len, seed=args.random_seed
    )
    if dist_env.is_main and args.obj == "clm":
        warn_of_ends({args.train_data: train_data, args.valid_data: valid_data})
    return train_data, valid_data


def read_training_data(args: argparse.Namespace) -> FT_Dataset:
    """Reads the examples to train on."""
    joint = args.obj == "jlm"
    return FT_Dataset(
        args.train_data, args.train_batch_size, args.seq_len, joint_lm=joint, seed=args.random_seed
    )


def build_run(
    args: argparse.Namespace,
    dist_env: DistEnv,
    train_data: FT_Dataset,
    valid_data: FT_Dataset,
    new_lora: bool,
) -> Run:
    """Builds a run; sets --max_step as `set_max_step` does.

    Args:
        args, dist_env, train_data, valid_data: see `Run`.
        new_lora: whether LoRA is initialized; False if a state is restored next.

    Raises:
        CheckpointError: the base cannot be read, or does not fit the flags.
        ValueError: a flag does not fit the model or the data.
    """
    epoch_steps = batches_per_epoch(train_data, dist_env)
    set_max_step(args, train_data, dist_env.world_size)
    set_seed(args.random_seed)
    held_in = compute_dtype(args.fp16, args.bf16)
    model, base = open_model(
        args, lora_dropout=args.lora_dropout, new_lora=new_lora, held_in=held_in
    )
    check_fits(args, model.config)
    choose_trained(model, args.lora_dim)
    cast_frozen(model, held_in)
    model.to(dist_env.device)
    set_dropout_seed(args.random_seed, dist_env.rank)

    optimizer = create_adam_optimizer(model, args)
    scheduler = create_optimizer_scheduler(optimizer, args)
    precision = Precision(held_in, dist_env.device.type)

    max_step = scheduler.max_step
    last_step = last_step_of(args, max_step, epoch_steps)
    check_updates(args.grad_acc, last_step)
    return Run(
        args,
        dist_env,
        train_data,
        valid_data,
        model,
        base,
        optimizer,
        scheduler,
        precision,
        epoch_steps,
        last_step,
        identity=identity_of(args, model.config, dist_env, max_step, last_step, base.fingerprint),
        loss_of=loss_function(precision, dist_env.device),
    )


def set_max_step(args: argparse.Namespace, data: FT_Dataset, processes: int) -> None:
    """Sets --max_step from --max_epoch if only the latter is given."""
    if args.max_step is None and args.max_epoch is not None:
        args.max_step = math.ceil(args.max_epoch * data.num_batches / processes)


def last_step_of(args: argparse.Namespace, max_step: int, epoch_steps: int) -> int:
    """Returns a run's last step: the end of the schedule, or of --max_epoch if that comes first."""
    return max_step if args.max_epoch is None else min(max_step, args.max_epoch * epoch_steps)


def set_up_model(run: Run) -> nn.Module:
    """Sets up how the model computes, and wraps it in DDP; all processes must have the same one."""
    args, dist_env = run.args, run.dist_env
    if dist_env.device.type == "cpu":
        choose_products(frozen_weights(run.model), run.precision.dtype, dist_env.world_size)
    if args.torch_compile:
        compile_layers(run.model.transformer.h, dist_env.device)
    ddp_model = wrap_ddp(
        run.model, dist_env.device, dist_env.world_size, args.cuda_graphs, init_sync=False
    )
    warm_up_ddp(ddp_model, lambda: run.loss_of(ddp_model, short_batch()).backward())
    return ddp_model


def take_steps(run: Run, ddp_model: nn.Module, progress: Progress, metrics: MetricsLog) -> float:
    """Trains to the last step; returns the best perplexity of all evaluations.

    Args:
        run: what to train, on what and how.
        ddp_model: the run's model as `set_up_model` returns it.
        progress: the last step that has been taken, and the best perplexity so far.
        metrics: where the run's figures go.
    """
    args, dist_env, optimizer = run.args, run.dist_env, run.optimizer
    step, best_ppl = progress
    pace = Pace(step, run.last_step)
    to_batch = collate
    add_gradients = gradients_of(ddp_model, run.loss_of, run.precision, args)
    if args.cuda_graphs:
        to_batch = FillingCollator(collate, {}, run.model.config.n_positions)
        add_gradients = GraphedStep(add_gradients, run.model)
    batches = batches_from(run.train_data, dist_env, args.random_seed, step, to_batch)
    bar = tqdm(
        range(step + 1, run.last_step + 1),
        total=run.last_step,
        initial=step,
        unit="step",
        disable=not dist_env.is_main or None,  # None: disabled if there is no terminal
    )
    run.model.train()
    losses = PendingLosses()
    tokens, since, resume_is_due = 0, time.perf_counter(), False
    for step in bar:
        batch = next(batches)
        run.scheduler.step()
        update_is_due = step % args.grad_acc == 0
        with sync_gradients(ddp_model, due=update_is_due):
            loss = add_gradients(batch)
        losses.add(step, loss)
        if losses.are_due:
            check_losses(losses, run.scheduler)
        if update_is_due:
            run.precision.step(optimizer, args.clip)
            optimizer.zero_grad()
        tokens += count_tokens(batch)
        watch.beat()

        if step % args.log_interval == 0:
            check_losses(losses, run.scheduler)
            speed = tokens / (time.perf_counter() - since)
            tokens, since = 0, time.perf_counter()
            show_step(bar, step, losses.last, run.scheduler.lr, pace)
            metrics.write(step, loss=losses.last, lr=run.scheduler.lr, tokens_per_second=speed)

        if step % args.eval_interval == 0:
            check_losses(losses, run.scheduler)
            paused = time.perf_counter()
            best_ppl = evaluate_step(run, step, best_ppl, metrics)
            since += time.perf_counter() - paused  # evaluation does not count towards the speed

        if step < run.last_step and (step % args.save_interval == 0 or step % run.epoch_steps == 0):
            check_losses(losses, run.scheduler)
            write_model(run, step, lora_only=args.lora_dim > 0)
            resume_is_due = True
        if resume_is_due and update_is_due:  # no gradients are pending
            check_losses(losses, run.scheduler)
            now = Progress(step, best_ppl)
            metrics.sync()  # first, because a resumed run adds only the lines of later steps
            write_run(run.work_dir, dist_env, run.identity, now, run.model, run.parts)
            resume_is_due = False
    check_losses(losses, run.scheduler)
    return best_ppl


def gradients_of(
    network: nn.Module,
    loss_of: Callable[..., Tensor],
    precision: Precision,
    args: argparse.Namespace,
) -> Callable[[Batch], Tensor]:
    """Returns a function that adds a batch's gradients, and returns its loss, detached."""

    def add_gradients(batch: Batch) -> Tensor:
        loss = loss_of(network, batch, args.label_smooth)
        precision.backward(loss / args.grad_acc)
        return loss.detach()

    return add_gradients


def evaluate_step(run: Run, step: int, best_ppl: float, metrics: MetricsLog) -> float:
    """Evaluates after a step, logs the figures, and returns the best perplexity so far.

    Raises:
        TrainingError: the loss is not finite.
    """
    valid_loss = evaluate(run.model, run.loss_of, run.valid_data, run.dist_env)
    if not math.isfinite(valid_loss):
        raise TrainingError(f"the validation loss after step {step} is {valid_loss}")
    ppl = math.exp(min(valid_loss, 700))  # exp(710) overflows
    best_ppl = min(best_ppl, ppl)
    figures = (step, run.last_step, valid_loss, ppl, best_ppl)
    logger.info("step %d of %d: valid_loss %.4f, valid_ppl %.3f, best_ppl %.3f", *figures)
    metrics.write(step, valid_loss=valid_loss, valid_ppl=ppl, best_ppl=best_ppl)
    return best_ppl


def agree_on_weights(model: nn.Module, read: Collection[str], world_size: int) -> None:
    """Gives all processes the same model; all of them have to call it.

    Tensors that were read from a file are compared. All others are the first process's, because the
    last bits of random or computed values may depend on the processor.

    Args:
        model: the model, not yet wrapped in DDP.
        read: the names of the tensors that were read from a file.
        world_size: the number of processes.

    Raises:
        TrainingError: a process has read different tensors.
    """
    check_same_weights(model, world_size, read)
    others = (tensor for name, tensor in own_tensors(model).items() if name not in read)
    share_tensors(others, world_size)


def warn_of_ends(data: Mapping[str, FT_Dataset]) -> None:
    """Warns of files, given as {path: data}, that do not teach a model where a text ends."""
    without = ", ".join(path for path, examples in data.items() if not examples.shows_ends())
    if without:
        logger.warning(
            "%s: completions do not all end in one token that occurs nowhere else in them, so the "
            "model cannot learn where a text ends: encode them with gpt2_encode.py --add_eos",
            without,
        )


def warn_of_rate(args: argparse.Namespace) -> None:
    """Warns if LoRA is trained at the default learning rate because --lr is not given."""
    uses_it = args.scheduler != "cycle"
    if args.lora_dim > 0 and uses_it and not args.lr_is_given:
        logger.warning(
            "--lr is not given: it is %g, the release's default; its recipes have 2e-4", args.lr
        )


def check_updates(grad_acc: int, last_step: int) -> None:
    """Checks that a run makes updates, and warns of steps at its end that are in none.

    Raises:
        ValueError: the run makes no update.
    """
    if last_step < grad_acc:
        raise ValueError(
            f"--grad_acc {grad_acc}: the run has {last_step} steps, so it would make no update"
        )
    if last_step % grad_acc:
        logger.warning(
            "--grad_acc %d: the last %d of %d steps make no update, as in the release",
            *(grad_acc, last_step % grad_acc, last_step),
        )


def loss_function(precision: Precision, device: torch.device) -> Callable[..., Tensor]:
    """Returns a function (model, batch, ε of label smoothing = 0) -> the batch's loss."""

    def loss_of(network: nn.Module, batch: Batch, label_smooth: float = 0.0) -> Tensor:
        names = ("input", "target", "mask", "packed_rows")
        *tensors, rows = (batch[name].to(device, non_blocking=True) for name in names)
        with precision.autocast():
            return network(*tensors, label_smooth, rows)

    return loss_of


def choose_trained(model: nn.Module, lora_dim: int) -> None:
    """Chooses what is trained: only LoRA or, if there is none, the whole model."""
    if lora_dim > 0:
        lora.mark_only_lora_as_trainable(model)
        return
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # so that it no longer maps the base's file


def check_losses(losses: PendingLosses, scheduler: Scheduler) -> None:
    """Reads the losses that have not been read yet, and checks them.

    Raises:
        TrainingError: a loss is not finite.
    """
    for step, loss in losses.read():
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss of step {step} is {loss} at learning rate "
                f"{scheduler.lr_at(step - 1):.3g}: that step is not saved; try a lower --lr"
            )


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loss_of: Callable[[nn.Module, Batch], Tensor],
    data: FT_Dataset,
    dist_env: DistEnv,
) -> float:
    """Returns the mean loss over all targets of the validation data, on every process."""
    model.eval()
    total, count = torch.zeros((), dtype=torch.float64, device=dist_env.device), 0.0
    for batch in validation_batches(data, dist_env):
        targets = float(batch["mask"].sum())
        # The model divides by this, 0.0001 included.
        total += loss_of(model, batch).double() * (targets + 0.0001)
        count += targets
        watch.beat()
    model.train()
    both = torch.stack([total, torch.full_like(total, count)])
    loss, count = sum_over_processes(both, dist_env.world_size).tolist()
    return loss / count


def estimate_run(args: argparse.Namespace, dist_env: DistEnv) -> Estimate:
    """Estimates what the training takes. The data is read if it exists, weights are not.

    Without data, and with --estimate_length, all rows have the same length, and every position has
    a target.
    """
    device, config = dist_env.device, config_of_flags(args, args.lora_dropout)
    check_fits(args, config)
    fp16, bf16 = estimate_precision(args.fp16, args.bf16, device)
    precise = argparse.Namespace(**{**vars(args), "fp16": fp16, "bf16": bf16})
    data = estimated_data(args)
    lengths = [data[index].length for index in range(len(data))]
    devices = args.estimate_devices or dist_env.world_size
    each_device = [replace(dist_env, world_size=devices, rank=rank) for rank in range(devices)]
    last_step = estimated_length(args, data, each_device[0])
    if last_step is not None:
        check_updates(args.grad_acc, last_step)
    epochs = batches_of_epochs(data, each_device, args.random_seed, last_step or 1)

    def build(layers: int | None) -> Training:
        return training_of(
            GPT2LMModel(config.with_layers(layers or config.n_layer)), precise, device
        )

    plan = Plan(
        build,
        lambda rows: collate([data[index] for index in rows]),
        *notable_batches(epochs, lengths),
        batches=args.grad_acc,
        steps=None if last_step is None else last_step // args.grad_acc,
        total=last_step,
        device=device,
        dtype=compute_dtype(args.fp16, args.bf16),
        devices=devices,
        rate=rate_of(args.estimate_rate),
    )
    return estimate(plan)


def estimated_data(args: argparse.Namespace) -> Sequence[Row]:
    """Returns the training data or, if missing or not asked for, a batch of equal rows."""
    if args.estimate_length is None and Path(args.train_data).is_file():
        return read_training_data(args)
    length = min(args.estimate_length or args.seq_len, args.seq_len)
    return [Row(torch.zeros(length + 1, dtype=torch.int32), length, 0)] * args.train_batch_size


def estimated_length(
    args: argparse.Namespace, data: Sequence[Row], dist_env: DistEnv
) -> int | None:
    """Returns the last step of the run that is estimated; None if it is unknown."""
    if not isinstance(data, FT_Dataset):
        return end_of_schedule(args)
    set_max_step(args, data, dist_env.world_size)
    end = end_of_schedule(args)
    return None if end is None else last_step_of(args, end, batches_per_epoch(data, dist_env))


def batches_of_epochs(
    data: Sequence[Row], each_device: Sequence[DistEnv], seed: int, last_step: int
) -> Iterator[list[Sequence[int]]]:
    """Yields the batches of all devices in each epoch, as the numbers of their rows."""
    if not isinstance(data, FT_Dataset):
        yield [range(len(data))]
        return
    epochs = math.ceil(last_step / batches_per_epoch(data, each_device[0]))
    for epoch in range(1, epochs + 1):
        orders = [training_order(data, device, seed, epoch) for device in each_device]
        size = data.batch_size
        yield [order[at : at + size] for order in orders for at in range(0, len(order), size)]


def training_of(model: nn.Module, args: argparse.Namespace, device: torch.device) -> Training:
    """Returns the parts of a training step for an estimate; see `take_steps`."""
    choose_trained(model, args.lora_dim)
    cast_frozen(model, compute_dtype(args.fp16, args.bf16))
    optimizer = create_adam_optimizer(model, args)
    precision = Precision(compute_dtype(args.fp16, args.bf16), device.type, scaled=False)
    add_gradients = gradients_of(model, loss_function(precision, device), precision, args)

    def update() -> None:
        precision.step(optimizer, args.clip)
        optimizer.zero_grad()

    return Training(model, optimizer, add_gradients, update)


def show_beginning(run: Run, step: int) -> None:
    """Logs what is trained, on what data and devices; `step` is the one resumed from, or 0."""
    args, dist_env = run.args, run.dist_env
    adapted = lora_in_words(run.model)
    batch = args.train_batch_size * dist_env.world_size
    accumulated = f", the optimizer's every {args.grad_acc}" if args.grad_acc > 1 else ""
    rows = [
        ("model", f"{args.model_card}, {args.init_checkpoint or 'initialized at random'}"),
        ("adapted by", f"LoRA of {adapted}" if adapted else "nothing"),
        ("trained", trained_in_words(run.model)),
        ("precision", str(run.precision.dtype).removeprefix("torch.")),
        ("devices", devices_in_words(dist_env.device, dist_env.world_size)),
        ("training set", counted(run.train_data.num_examples, "example")),
        ("evaluated on", counted(run.valid_data.num_examples, "example")),
        ("steps", f"{steps_in_words(run.last_step, batch)}{accumulated}"),
        ("learning rate", args.i_lrs if args.scheduler == "cycle" else f"{args.lr:g}"),
        ("output", os.path.abspath(args.work_dir)),
    ]
    if args.cuda_graphs:
        rows.append(IN_USE)
    if step:
        rows.append(("resuming from", f"{RESUME_NAME}, step {step:,}"))
    elif not args.cuda_graphs and why_no_graphs(dist_env.device, args.torch_compile) is None:
        rows.append(HINT)
    logger.info("training\n%s", table(rows, indent="  "))


def show_step(bar: tqdm, step: int, loss: float, lr: float, pace: Pace) -> None:
    """Shows a step's figures, on the bar or, if there is none, as a line of the log."""
    bar.set_postfix(loss=f"{loss:.3f}", lr=f"{lr:.2e}", refresh=False)
    if bar.disable:
        figures = (step, bar.total, loss, lr, pace.at(step))
        logger.info("step %d of %d: loss %.3f, lr %.2e; %s", *figures)


def show_end(
    run: Run, resumed_from: int, best_ppl: float, begun: float, curves: Path | None
) -> None:
    """Logs the results of a run, and where its files are.

    Args:
        run: a run that has ended.
        resumed_from: the step that it resumed from, or 0.
        best_ppl: the best perplexity of its evaluations; infinite if there was none.
        begun: when the run began, by `time.perf_counter`.
        curves: the path of the learning curves' picture, if there is one.
    """
    steps = training_in_words(run.last_step, resumed_from, time.perf_counter() - begun)
    rows = [("trained", f"{trained_in_words(run.model)}; {steps}")]
    if best_ppl < math.inf:
        rows.append(("best", f"valid_ppl {best_ppl:.3f}"))
    rows.append(("model", os.path.abspath(model_path(run, run.last_step))))
    if curves is not None:
        rows.append(("curves", os.path.abspath(curves)))
    logger.info("finished\n%s", table(rows, indent="  "))


def model_path(run: Run, step: int) -> Path:
    """Returns the path of the model's file after a step."""
    return run.work_dir / f"model.{step}.pt"


def write_model(run: Run, step: int, lora_only: bool) -> None:
    """Writes ``model.<step>.pt``, in the main process."""
    if run.dist_env.is_main:
        path = model_path(run, step)
        save_model(path, run.model, run.base, lora_only)
        logger.info("wrote %s", path)


if __name__ == "__main__":
    script.run(main)
