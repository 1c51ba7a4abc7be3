"""Train RoBERTa by masked language modeling on a text file, from scratch or from a model.

    python examples/language-modeling/run_mlm.py --train_file corpus.txt --output_dir base \
        --do_train --hidden_size 256 --num_hidden_layers 4 --num_attention_heads 4

Without --model_name_or_path, a byte-level BPE vocabulary is learned from the text, and a model of
the given shape is initialized at random. What it writes is a base model for run_glue.py.
"""

from __future__ import annotations

import logging
import math
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    from loralib.training.process import begin

    begin()

from tokenizers import ByteLevelBPETokenizer

from loralib.errors import AdapterAsModelError
from loralib.io.encoding import refuse_utf16_file
from loralib.training.watch import beat
from transformers import (
    AutoModelForMaskedLM,
    DataCollatorForLanguageModeling,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    RobertaConfig,
    RobertaTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.data.processors.utils import numbered_lines
from transformers.data.text_files import check_is_file, load_rows
from transformers.fine_tuning.adapted_model import build_model, load_config, untrained_model
from transformers.fine_tuning.arguments import AdaptedModelArguments
from transformers.fine_tuning.folders import check_sources_kept, find_checkpoint
from transformers.fine_tuning.lengths import (
    CUT,
    DEFAULT_LENGTH,
    check_room,
    choose_length,
    drop_cuts,
    truncated_rows,
)
from transformers.fine_tuning.script import check_scores, print_estimate, report, start, train
from transformers.hf_argparser import flag
from transformers.trainer_estimate import EstimateArguments
from transformers.utils.cli import load_tokenizer, run_script, set_up_datasets

if TYPE_CHECKING:  # imported where data is read, so that --help and wrong flags answer at once
    from datasets import Dataset

logger = logging.getLogger(__name__)

SPECIAL_TOKENS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


@dataclass
class ModelArguments:
    """A model to start from, or the shape of a new one."""

    model_name_or_path: str | None = flag(None, "start from this model, with its tokenizer")
    cache_dir: str | None = flag(None, "folder for downloads and for tables of data")
    vocab_size: int = flag(8000, "new model: most entries of the vocabulary to learn")
    hidden_size: int = flag(256, "new model: width")
    num_hidden_layers: int = flag(4, "new model: layers")
    num_attention_heads: int = flag(4, "new model: heads per layer")
    intermediate_size: int = flag(1024, "new model: width within the feed-forward parts")
    hidden_dropout_prob: float = flag(0.1, "new model: dropout of what its parts return")
    attention_probs_dropout_prob: float = flag(0.1, "new model: dropout of attention's weights")


@dataclass
class TextArguments:
    """The text to train and evaluate on."""

    train_file: str = field(metadata={"help": "a text file, one example a line"})
    validation_file: str | None = flag(None, "the same, to evaluate on")
    max_seq_length: int | None = flag(
        None,
        "longer lines are cut to this number of tokens (default: 128, or as many as the model "
        "takes)",
        least=1,
    )
    mlm_probability: float = flag(0.15, "share of the tokens to predict", above=0, most=1)


def learn_tokenizer(file: str, vocab_size: int, max_length: int) -> PreTrainedTokenizerBase:
    """Learns a byte-level BPE vocabulary from a text file.

    Raises:
        ValueError: the vocabulary has no room for all bytes and the special tokens.
    """
    least = 256 + len(SPECIAL_TOKENS)
    if vocab_size < least:
        raise ValueError(f"--vocab_size {vocab_size}: bytes and special tokens alone take {least}")
    bpe = ByteLevelBPETokenizer()
    bpe.train(file, vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, show_progress=False)
    with tempfile.TemporaryDirectory() as folder:
        vocab, merges = bpe.save_model(folder)
        return RobertaTokenizerFast(vocab, merges, model_max_length=max_length)


def new_config(model_args: ModelArguments, vocab_size: int, max_length: int) -> PretrainedConfig:
    """Returns the settings of a new model."""
    return RobertaConfig(
        vocab_size=vocab_size,
        hidden_size=model_args.hidden_size,
        num_hidden_layers=model_args.num_hidden_layers,
        num_attention_heads=model_args.num_attention_heads,
        intermediate_size=model_args.intermediate_size,
        hidden_dropout_prob=model_args.hidden_dropout_prob,
        attention_probs_dropout_prob=model_args.attention_probs_dropout_prob,
        max_position_embeddings=max_length + 2,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
        # RoBERTa's 0.02 suits its own width. Such small weights would slow a narrow model's start.
        initializer_range=model_args.hidden_size**-0.5,
    )


def choose_shape(
    model_args: ModelArguments, text_args: TextArguments
) -> tuple[PretrainedConfig, PreTrainedTokenizerBase, int]:
    """Returns the model's settings, its tokenizer, and the length to which lines are truncated."""
    length = text_args.max_seq_length
    if model_args.model_name_or_path:
        config = load_config(shared_arguments(model_args), finetuning_task=None, text_columns=None)
        tokenizer = load_tokenizer(
            model_args.model_name_or_path, config, cache_dir=model_args.cache_dir
        )
        return config, tokenizer, choose_length(length, config, tokenizer, is_pair=False)
    length = DEFAULT_LENGTH if length is None else length
    tokenizer = learn_tokenizer(text_args.train_file, model_args.vocab_size, length)
    check_room(length, tokenizer, is_pair=False)
    return new_config(model_args, len(tokenizer), length), tokenizer, length


def shared_arguments(model_args: ModelArguments) -> AdaptedModelArguments:
    """Returns the flags of the model to start from, as the other scripts have them."""
    return AdaptedModelArguments(model_args.model_name_or_path, cache_dir=model_args.cache_dir)


def make_model(
    model_args: ModelArguments, config: PretrainedConfig, args: TrainingArguments
) -> PreTrainedModel:
    """Returns the model; if it has adapters, only they and the head are trainable.

    Raises:
        ValueError: the run only evaluates, and the model's head is not trained.
    """
    if model_args.model_name_or_path is None:
        return untrained_model(AutoModelForMaskedLM, config)
    way_out = "a model that is trained to fill masks, or --do_train as well"
    return build_model(
        AutoModelForMaskedLM, shared_arguments(model_args), config, (), args, way_out=way_out
    )


def check_stages(
    model_args: ModelArguments, text_args: TextArguments, args: TrainingArguments
) -> None:
    """Checks that there is something to do, and that nothing it needs is missing.

    Raises:
        ValueError: there is nothing to do, or a flag that it needs is not given.
    """
    if not (args.do_train or args.do_eval):
        raise ValueError("nothing to do: give --do_train or --do_eval")
    if args.do_eval and text_args.validation_file is None:
        raise ValueError("--do_eval needs --validation_file")
    if not (args.do_train or model_args.model_name_or_path):
        raise ValueError(
            "there is nothing to evaluate: --do_eval without --do_train needs --model_name_or_path"
        )


def check_text(path: str) -> None:
    """Checks that a file exists and holds UTF-8 text.

    Raises:
        OSError, ValueError: the file is missing, empty, or not in UTF-8.
    """
    check_is_file(path)
    refuse_utf16_file(path)
    texts = sum(bool(line.strip()) for _, line in numbered_lines(path))  # reads the whole file
    if not texts:
        raise ValueError(f"{path}: holds no text")


def read_sets(
    text_args: TextArguments,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    cache_dir: str | None,
) -> dict[str, Dataset]:
    """Reads the files' lines as token ids, by set, and logs how many were truncated."""
    files = {"train": text_args.train_file, "validation": text_args.validation_file}
    sets = {
        name: read_lines(file, tokenizer, max_length, cache_dir)
        for name, file in files.items()
        if file
    }
    return drop_cuts(sets, max_length)


def read_lines(
    path: str, tokenizer: PreTrainedTokenizerBase, max_length: int, cache_dir: str | None
) -> Dataset:
    """Reads a file's non-empty lines as token ids, with the column `CUT`."""
    lines = load_rows("text", path, cache_dir=cache_dir, encoding="utf-8-sig")
    lines = lines.filter(lambda row: bool(row["text"].strip()))

    def encode(rows: dict[str, list]) -> dict[str, list]:
        beat()
        encoded = tokenizer(rows["text"], truncation=True, max_length=max_length)
        masks = encoded["attention_mask"]
        return {**encoded, CUT: truncated_rows(tokenizer, [rows["text"]], masks, max_length)}

    return lines.map(
        encode,
        batched=True,
        remove_columns=["text"],
        desc=f"tokenizing {Path(path).name}",
    )


def perplexity(loss: float) -> float:
    """Returns exp(loss), for a mean cross-entropy in nats; infinity if that overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def train_and_evaluate(
    model_args: ModelArguments, text_args: TextArguments, args: TrainingArguments
) -> None:
    """Trains, saves and evaluates the model, as the flags ask for."""
    set_up_datasets(model_args.cache_dir)
    check_stages(model_args, text_args, args)
    check_scores(args, ())  # only the last evaluation computes the perplexity
    check_sources_kept(args, {"model_name_or_path": model_args.model_name_or_path})
    checkpoint = find_checkpoint(args)
    for file in filter(None, (text_args.train_file, text_args.validation_file)):
        check_text(file)

    set_seed(args.seed)
    config, tokenizer, length = choose_shape(model_args, text_args)
    model = make_model(model_args, config, args)
    sets = read_sets(text_args, tokenizer, length, model_args.cache_dir)
    trainer = Trainer(
        model,
        args,
        DataCollatorForLanguageModeling(tokenizer, mlm_probability=text_args.mlm_probability),
        train_dataset=sets["train"],
        eval_dataset=sets.get("validation"),
        tokenizer=tokenizer,
    )
    if args.do_train:
        train(trainer, checkpoint)
    if args.do_eval:
        trainer.label_smoother = None  # perplexity is defined without smoothing
        metrics = trainer.evaluate()
        metrics["perplexity"] = perplexity(metrics["eval_loss"])
        report(trainer, "eval", metrics, trainer.eval_dataset)
    trainer.log_end()


def estimate(
    model_args: ModelArguments,
    text_args: TextArguments,
    args: TrainingArguments,
    estimate_args: EstimateArguments,
) -> None:
    """Prints an estimate of what training takes; reads the text, but no weights."""
    if estimate_args.estimate_length is not None:
        raise ValueError("--estimate_length does not apply here: lengths are those of --train_file")
    set_up_datasets(model_args.cache_dir)
    check_text(text_args.train_file)
    config, tokenizer, length = choose_shape(model_args, text_args)
    lines = replace(text_args, validation_file=None)
    print_estimate(
        AutoModelForMaskedLM,
        config,
        args,
        estimate_args,
        read_sets(lines, tokenizer, length, model_args.cache_dir)["train"],
        DataCollatorForLanguageModeling(tokenizer, mlm_probability=text_args.mlm_probability),
    )


def merging_first(error: AdapterAsModelError) -> str:
    """Returns the advice for a user who gives an adapter, which this script does not take."""
    base = shlex.quote(error.base) if error.base else "BASE"
    command = f"utils/convert.py {shlex.quote(error.source)} FOLDER --to merged --base {base}"
    return f"this script takes no adapters: {command} makes one model of both"


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, and runs what it asks for."""
    start(argv, __doc__, (ModelArguments, TextArguments), train_and_evaluate, estimate)


if __name__ == "__main__":
    run_script(main, {AdapterAsModelError: merging_first})
