"""The Trainer's data loaders for `train`, `evaluate` and `predict`."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from loralib.errors import TrainingError
from loralib.nn.packing import PackedRows

from .trainer_callback import TrainerState
from .trainer_checks import check_evaluation_set
from .trainer_data import (
    EvaluationBatches,
    ExampleSampler,
    TrainingBatches,
    is_iterable_only,
    length_of,
    lengths_of,
    used_columns,
)
from .trainer_pt_utils import IterableDatasetShard
from .training_args import TrainingArguments
from .utils import logging

logger = logging.get_logger(__name__)


class TrainerLoaders:
    """The part of `Trainer` that makes its loaders, and puts batches on its device."""

    args: TrainingArguments
    state: TrainerState
    model: nn.Module
    label_names: list[str]
    data_collator: Callable[[list[Any]], Mapping[str, Any]]
    train_dataset: Dataset | None
    eval_dataset: Dataset | None

    def get_train_dataloader(self) -> DataLoader:
        """Returns the loader of this process's batches in an epoch of `train_dataset`.

        Override it for another order or other batches. There have to be as many on every process,
        and a run that resumes within an epoch reads those it has seen again.

        Raises:
            ValueError: there is no `train_dataset`.
        """
        if self.train_dataset is None:
            raise ValueError("Trainer: training needs a train_dataset")
        args, dataset = self.args, self.train_dataset
        if not is_iterable_only(dataset):
            return self._loader(
                dataset,
                args.train_batch_size,
                sampler=self._get_train_sampler(),
                drop_last=args.dataloader_drop_last,
            )
        if args.dataloader_num_workers > 1 and args.is_main_process:
            logger.warning(
                "each of %s workers iterates over the training set: it has to divide its examples "
                "among them, see torch.utils.data.get_worker_info",
                args.dataloader_num_workers,
            )
        if args.world_size > 1 or not isinstance(dataset, IterableDataset):
            dataset = IterableDatasetShard(
                dataset,
                args.train_batch_size,
                args.dataloader_drop_last,
                args.world_size,
                args.process_index,
                args.seed,
            )
        return self._loader(dataset, args.train_batch_size, drop_last=args.dataloader_drop_last)

    def get_eval_dataloader(self, eval_dataset: Dataset | None = None) -> DataLoader:
        """Returns the loader of this process's share of a set (default: the Trainer's), in order.

        If no subclass overrides this, `evaluate` does not use it. Its own batches have examples of
        about one length, and ``args.dataloader_drop_last`` does not apply to them.
        """
        dataset = self._evaluated(self.eval_dataset if eval_dataset is None else eval_dataset)
        return self._loader(
            dataset,
            self.args.eval_batch_size,
            sampler=self._get_eval_sampler(dataset),
            drop_last=self.args.dataloader_drop_last,
        )

    def get_test_dataloader(self, test_dataset: Dataset) -> DataLoader:
        """Returns the loader for `predict`; like `get_eval_dataloader`."""
        return TrainerLoaders.get_eval_dataloader(self, test_dataset)

    def _get_train_sampler(self) -> Sampler | None:
        """Returns the order of this process's examples; users' subclasses may override it."""
        return ExampleSampler(self._training_batches())

    def _get_eval_sampler(self, eval_dataset: Dataset) -> Sampler | None:
        """Returns the order of an evaluation set; see `_get_train_sampler`."""
        return ExampleSampler(self._evaluation_batches(eval_dataset, None))

    def num_examples(self, dataloader: Any) -> int:
        """Returns the number of examples in a loader's set, over all processes.

        Raises:
            ValueError: the set has no length.
        """
        count = length_of(dataloader.dataset)
        if count is None:
            raise ValueError("the loader's set has no length")
        return count

    def _loader(self, dataset: Dataset, batch_size: int, **settings: Any) -> DataLoader:
        args = self.args
        if args.remove_unused_columns:
            dataset = used_columns(dataset, self.model, self.label_names)
        return DataLoader(
            dataset,
            batch_size,
            collate_fn=self.data_collator,
            # Without a generator of its own, the loader would draw from dropout's generator, once
            # per epoch and at every resume.
            generator=torch.Generator().manual_seed(args.seed + self.state.global_step),
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and args.device.type == "cuda",
            **settings,
        )

    def _training_batches(self) -> TrainingBatches:
        args = self.args
        return TrainingBatches(
            len(self.train_dataset),
            args.train_batch_size,
            args.seed,
            args.world_size,
            args.process_index,
            args.dataloader_drop_last,
            lengths_of(self.train_dataset) if args.group_by_length else None,
        )

    def _evaluation_batches(self, dataset: Dataset, lengths: list[int] | None) -> EvaluationBatches:
        args = self.args
        return EvaluationBatches(
            len(dataset), args.eval_batch_size, args.world_size, args.process_index, lengths
        )

    def _evaluated(self, dataset: Dataset | None) -> Dataset:
        """Checks a set to evaluate, and returns it, as a list if it can only be iterated over.

        Raises:
            ValueError: there is no set, or it is empty or has no length.
        """
        if dataset is None:
            raise ValueError("Trainer: evaluating needs an eval_dataset")
        check_evaluation_set(dataset)
        if len(dataset) == 0:
            raise ValueError("the set to evaluate is empty")
        return list(dataset) if is_iterable_only(dataset) else dataset

    def _prepare_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a batch with its tensors on the device.

        Raises:
            TrainingError: the batch is not a dict.
        """
        if not hasattr(inputs, "items"):
            raise TrainingError(
                f"a batch is a {type(inputs).__name__}, not a dict with the model's arguments by "
                "name: have the data_collator make one"
            )

        def moved(value: Any) -> Any:
            if isinstance(value, Tensor | PackedRows):
                return value.to(self.args.device, non_blocking=True)
            return value

        return {name: moved(value) for name, value in inputs.items()}
