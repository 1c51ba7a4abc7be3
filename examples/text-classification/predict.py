"""Label texts, or tag words, for many tasks with one base: each line names its LoRA adapter.

    python examples/text-classification/predict.py --model_name_or_path roberta-base \
        rte=output/rte mnli=someone/their-peft-adapter sst2=sst2_lora.bin --lora_alpha 16 \
        --input_file texts.jsonl --output_file predictions.jsonl

Input and output are JSON lines, in the same order:

    {"adapter": "rte", "text": "A dog runs.", "text_pair": "An animal moves.", "id": 7}
    {"adapter": "rte", "text": …, "label": "entailment", "probabilities": {"entailment": 0.93, …}}

A line without text_pair is a single text. A line may leave out adapter if there is only one. Other
keys, such as id, are copied to the output. A regression head gives "score" instead of label and
probabilities. If a text was truncated to --max_seq_length, its answer has "truncated": true. Empty
input gives empty output.

Adapters for token classification tag words. A word that was cut off gets null for both:

    {"adapter": "ner", "tokens": ["Ada", "Lovelace", "met", "him"]}
    {"adapter": "ner", "tokens": …, "tags": ["B-PER", "I-PER", …], "probabilities": [0.98, …]}

The base is loaded once, and a batch holds rows of several adapters:

    lines ─ tokenize ─> rows of ids ─ batches ─> rows of about one length, grouped by adapter
          ─ compute_logits ─> logits in the lines' order ─ answer ─> labels and probabilities
"""

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from loralib.training.process import begin

    begin()

import numpy as np
import torch
from tqdm.auto import tqdm

from loralib.adapters.adapter import Adapter
from loralib.adapters.checks import check_family
from loralib.adapters.families import Family
from loralib.adapters.formats import read_adapter
from loralib.adapters.validation import check_lora
from loralib.errors import AdapterAsModelError, FullModelError, ModelAsAdapterError
from loralib.io.atomic import atomic_write, check_apart, check_writable
from loralib.io.command_line import check_bounds, summary
from loralib.io.encoding import refuse_utf16
from loralib.serving.bank import AdapterBank
from loralib.text import counted, in_short, quoted
from loralib.training.determinism import set_up_device
from loralib.training.device import choose_device
from loralib.training.precision import Precision, cast_frozen, check_precision
from loralib.training.process import LOG_LEVELS
from loralib.training.product_choices import choose_products, frozen_weights
from transformers import (
    AutoConfig,
    DataCollatorWithPadding,
    HfArgumentParser,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.adapter_kinds import KINDS
from transformers.data.data_collator import PackedCollator
from transformers.data.json_rows import RepeatedKeyError, without_repetition
from transformers.data.text_columns import warn_of_empty_texts
from transformers.data.word_labels import first_tokens
from transformers.fine_tuning.lengths import choose_length, report_truncation, truncated_rows
from transformers.models.auto.configuration_auto import supported_family_of
from transformers.models.auto.modeling_auto import auto_model_for
from transformers.utils.cli import load_tokenizer, run_script, set_up_logging
from transformers.utils.logging import errors_only

logger = logging.getLogger(__name__)

STANDARD_STREAM = "-"
# The keys of the answers, which lines of the input must not have.
TRUNCATED = "truncated"
ANSWERS = ("label", "probabilities", "score", "tags", TRUNCATED)
# The key of a line that each kind of head reads.
INPUTS = {"sequence_classification": "text", "token_classification": "tokens"}
# How many lines are tokenized at once: beside a row's ids, a tokenizer returns several times as
# much, such as the place of each token in its text.
AT_ONCE = 1000


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line; ``adapters`` becomes a dict of each adapter's source by name."""
    parser = HfArgumentParser(
        [],
        description=summary(__doc__),
        takes_empty=False,
        other_names={"lora_path": "adapters are given without a flag, as NAME=ADAPTER"},
    )
    add = parser.add_argument
    add("--model_name_or_path", required=True, help="the base: a model's folder, or hub name")
    add(
        "adapters",
        nargs="+",
        metavar="NAME=ADAPTER",
        help="a name that lines refer to, and a LoRA file, a folder with one, or a name on the hub",
    )
    add("--input_file", default=STANDARD_STREAM, help="JSON lines of texts; - is stdin")
    add(
        "--output_file",
        default=STANDARD_STREAM,
        help="JSON lines of answers, written when all are complete; - is stdout",
    )
    add(
        "--max_seq_length",
        type=int,
        help="longer texts are cut to this many tokens; default: 128, or as many as the model "
        "takes",
    )
    add("--batch_size", type=int, default=32, help="rows per batch, of any adapters")
    add("--lora_alpha", type=float, help="alpha of the adapters that do not record one")
    add("--bf16", action="store_true", help="compute in bfloat16, on a GPU or a CPU")
    add("--tf32", action="store_true", help="on a GPU, compute float32 in TensorFloat-32")
    add("--no_cuda", action="store_true", help="stay on the CPU even where there is a GPU")
    add("--cache_dir", help="where to keep what is downloaded")
    add("--model_revision", default="main", help="branch, tag or commit of the base on the hub")
    add(
        "--use_auth_token",
        action="store_true",
        help="use the token of `hf auth login`, for private models and adapters",
    )
    add("--log_level", choices=LOG_LEVELS, help="lowest level of messages to show (default: info)")
    args, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        parser.refuse(unknown)
    try:
        check_bounds("--batch_size", args.batch_size, least=1)
        check_bounds("--max_seq_length", args.max_seq_length, least=1)
        check_bounds("--lora_alpha", args.lora_alpha, above=0)
        args.adapters = sources_by_name(args.adapters)
    except ValueError as error:
        parser.error(str(error))
    return args


def sources_by_name(arguments: Sequence[str]) -> dict[str, str]:
    """Splits arguments ``name=adapter`` into a dict.

    Raises:
        ValueError: an argument does not have this format, or two have the same name.
    """
    sources: dict[str, str] = {}
    for argument in arguments:
        name, _, source = argument.partition("=")
        if not name or not source:
            raise ValueError(f"'{argument}' is not NAME=ADAPTER")
        if name in sources:
            raise ValueError(
                f"two adapters have the name '{name}': {sources[name]} and {source}; "
                "give one another name"
            )
        sources[name] = os.path.expanduser(source)  # the parser expands only whole values
    return sources


# ------------------------------------------------------------------------------------------------
# Lines
# ------------------------------------------------------------------------------------------------


def read_lines(path: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """Reads the input's lines, and adds the key ``adapter`` where it is missing.

    Args:
        path: a file of JSON lines, or ``-`` for stdin.
        names: the adapters' names.

    Raises:
        ValueError: a line is wrong; the message has its number.
    """
    is_stdin = path == STANDARD_STREAM
    if not is_stdin and not Path(path).exists():
        raise FileNotFoundError(f"--input_file {path}: no such file")
    if not is_stdin and Path(path).is_dir():
        raise IsADirectoryError(f"--input_file {path} is a folder")
    if is_stdin and sys.stdin is None:
        raise OSError("stdin is closed: give --input_file")
    source, lines = _in_words(path), []
    with nullcontext(sys.stdin.buffer) if is_stdin else open(path, "rb") as file:
        contents = file.readlines()
    refuse_utf16(source, contents[0] if contents else b"")
    # Drops blank lines at the end. Elsewhere, they are errors, as they would shift the answers.
    while contents and not contents[-1].strip():
        contents.pop()
    for number, content in enumerate(contents, start=1):
        try:
            lines.append(_parse(content.strip(), names))
        except ValueError as error:
            raise ValueError(f"{source}: line {number}: {error}") from error
    return lines


def _in_words(source: str) -> str:
    return "stdin" if source == STANDARD_STREAM else source


def _parse(content: bytes, names: Sequence[str]) -> dict[str, Any]:
    """Parses and checks a line, and fills in its adapter if there is only one."""
    if not content:
        raise ValueError("is blank; only lines at the end may be blank")
    line = _decoded(content, names)
    if "tokens" in line:
        _check_words(line)
    elif "text" not in line:
        raise ValueError(
            f"has no text{', only ' + quoted(line) if line else ''}: give a text as 'text' (a pair "
            "as 'text' and 'text_pair', words to tag as 'tokens'), whatever the column was called "
            f"in training; {_example(names)}"
        )
    for key in ("text", "text_pair"):
        if not isinstance(line.get(key, ""), str):
            raise ValueError(f"its {key} is not a string ({json.dumps(line[key]):.40})")
    for key in ANSWERS:
        if key in line:
            raise ValueError(f"has the key '{key}', which the answer needs: give it another name")
    if "adapter" not in line and len(names) > 1:
        raise ValueError(f"does not name its adapter, one of {in_short(names)}")
    line.setdefault("adapter", names[0])
    _check_adapter(line["adapter"], names)
    return line


def _example(names: Sequence[str]) -> str:
    return f'a line looks like {{"adapter": {json.dumps(names[0])}, "text": "A dog runs."}}'


def _decoded(content: bytes, names: Sequence[str]) -> dict[str, Any]:
    try:
        line = json.loads(content, object_pairs_hook=without_repetition)
        # The answer repeats the line in UTF-8, which cannot encode every JSON string.
        _encoded(line)
    except RepeatedKeyError:
        raise
    except (ValueError, RecursionError) as error:
        # Leaves out the position in JSON's message, whose "line 1" would mislead.
        raise ValueError(
            f"is not JSON ({getattr(error, 'msg', error)}); {_example(names)}"
        ) from error
    if not isinstance(line, dict):
        raise ValueError(f"is not a JSON object ({content.decode():.40})")
    return line


def _check_adapter(name: Any, names: Sequence[str]) -> None:
    if name in names:
        return
    adapter = json.dumps(name, ensure_ascii=False)
    if not isinstance(name, str):
        quoted_names = in_short(names, quote='"')
        raise ValueError(f"its adapter is not a string ({adapter:.40}), such as {quoted_names}")
    raise ValueError(f"unknown adapter {adapter} (expected {in_short(names)})")


def _check_words(line: Mapping[str, Any]) -> None:
    words = line["tokens"]
    for key in ("text", "text_pair"):
        if key in line:
            raise ValueError(f"has both tokens and {key}")
    if not isinstance(words, list) or not words:
        raise ValueError(f"its tokens are not a list of words ({json.dumps(words):.40})")
    for number, word in enumerate(words, start=1):
        if not isinstance(word, str) or not word.strip():
            raise ValueError(f"token {number} is not a word ({json.dumps(word):.40})")


def check_inputs(lines: Sequence[Mapping[str, Any]], head: str, source: str) -> None:
    """Checks that each line has the key that the adapters' head reads.

    Raises:
        ValueError: a line lacks it; the message has its number.
    """
    for number, line in enumerate(lines, start=1):
        if INPUTS[head] not in line:
            raise ValueError(
                f"{source}: line {number}: has no {INPUTS[head]}, which the adapters' {head} reads"
            )


def check_texts(
    lines: Sequence[Mapping[str, Any]], adapters: Mapping[str, Adapter], source: str
) -> None:
    """Checks that each line has as many texts as its adapter was trained on, if known.

    Raises:
        ValueError: a line has a text_pair but should not, or the reverse; the message has its
            number.
    """
    for number, line in enumerate(lines, start=1):
        adapter = adapters[line["adapter"]]
        columns = adapter.metadata.text_columns if adapter.metadata else None
        if columns is not None and len(columns) != 1 + ("text_pair" in line):
            raise ValueError(
                f"{source}: line {number}: has {'a' if 'text_pair' in line else 'no'} text_pair, "
                f"but {adapter.source} was trained on rows of {' and '.join(columns)}"
            )


def _encoded(line: Any) -> bytes:
    return json.dumps(line, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def write_lines(path: str, lines: Iterable[Mapping[str, Any]]) -> None:
    """Writes JSON lines, to a file (atomically) or to stdout if `path` is ``-``."""
    content = b"".join(map(_encoded, lines))
    if path == STANDARD_STREAM:
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
        return
    with atomic_write(path) as temporary:
        temporary.write_bytes(content)


def check_output(path: str, source: str) -> None:
    """Checks, before anything is computed, that `path` can be written, and creates its folder.

    Raises:
        OSError: it cannot be written.
        ValueError: it is `source`, the input.
    """
    if path == STANDARD_STREAM:
        if sys.stdout is None:
            raise OSError("stdout is closed: give --output_file")
        return
    check_apart([path], [source] if source != STANDARD_STREAM else [])
    if Path(path).is_dir():
        raise IsADirectoryError(f"--output_file {path} is a folder")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    check_writable(path)


# ------------------------------------------------------------------------------------------------
# Model
# ------------------------------------------------------------------------------------------------


def load_config(args: argparse.Namespace) -> PretrainedConfig:
    """Loads the base's settings.

    Raises:
        ValueError: the model is not a base.
    """
    name = args.model_name_or_path
    config = AutoConfig.from_pretrained(name, **_where(args))
    for kind in KINDS:
        if getattr(config, kind.switch):
            raise ValueError(
                f"{name} is not a base: its config.json has {kind.switch}; give the model that it "
                "was trained from (utils/split_lora.py extracts what was trained as an adapter)"
            )
    return config


def _where(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "cache_dir": args.cache_dir,
        "revision": args.model_revision,
        "use_auth_token": args.use_auth_token,
    }


def read_adapters(args: argparse.Namespace, family: Family) -> dict[str, Adapter]:
    """Reads the adapters by name, and warns of those that do not name their labels.

    Args:
        args: the flags.
        family: the base's family.

    Raises:
        AlphaError: an adapter does not record its alpha, or all do and --lora_alpha differs.
        CheckpointError: an adapter cannot be read, or is of another family.
    """
    where = {"cache_dir": args.cache_dir, "token": args.use_auth_token}
    adapters = {name: read_adapter(source, **where) for name, source in args.adapters.items()}
    for adapter in adapters.values():
        check_family(adapter, family)
    if args.lora_alpha is not None:
        # It is for adapters that do not record their own. If all do, it has to be the same.
        silent = [name for name, adapter in adapters.items() if adapter.metadata is None]
        for name in silent or adapters:
            adapters[name] = check_lora(adapters[name], args.lora_alpha)
    for name, adapter in adapters.items():
        if adapter.metadata is not None and adapter.metadata.labels is None:
            source = args.adapters[name]
            logger.warning("%s does not name its labels: they are LABEL_0, LABEL_1, …", source)
    return adapters


def head_of(adapters: Mapping[str, Adapter]) -> str:
    """Returns the head that all adapters are for.

    Raises:
        ValueError: the adapters are for different heads, or for one that is not supported here.
    """
    heads: dict[str, str] = {}
    for adapter in adapters.values():
        heads.setdefault(adapter.head or next(iter(INPUTS)), adapter.source)
    if len(heads) > 1:
        listed = ", ".join(f"{head} ({source})" for head, source in heads.items())
        raise ValueError(f"the adapters are for different heads: {listed}; give those of one head")
    ((head, source),) = heads.items()
    if head not in INPUTS:
        raise ValueError(f"{source}: is for {head}, but predict.py has only {' and '.join(INPUTS)}")
    return head


def load_model(
    args: argparse.Namespace, config: PretrainedConfig, head: str
) -> tuple[PreTrainedModel, Precision]:
    """Loads the base with a head onto the device, and returns it with the precision to use."""
    device = choose_device(0, args.no_cuda)
    check_precision(False, args.bf16, device)
    set_up_device(tf32=args.tf32)
    precision = Precision(torch.bfloat16 if args.bf16 else torch.float32, device.type)
    with errors_only():
        model = auto_model_for(head).from_pretrained(
            args.model_name_or_path, config=config, held_in=precision.dtype, **_where(args)
        )
    model.train_only(())
    if args.bf16:
        cast_frozen(model, precision.dtype, model.tensors_read)
    return model.to(device), precision


def fill_bank(
    model: PreTrainedModel, adapters: Mapping[str, Adapter], base: str
) -> tuple[AdapterBank, dict[str, tuple[str, ...]]]:
    """Makes a bank of the adapters over the base.

    Args:
        model: the base.
        adapters: the adapters by name.
        base: the base's name, for messages.

    Returns:
        The bank, and each adapter's labels in the order of its outputs.

    Raises:
        CheckpointError: an adapter does not fit the base.
        ValueError: neither an adapter nor the base has a trained head, or an adapter has two labels
            of the same name.
    """
    bank = AdapterBank(model)
    labels = {}
    for name, adapter in adapters.items():
        bank.add(name, adapter)
        untrained = model.newly_initialized - adapter.tensors.keys()
        if untrained:
            raise ValueError(
                f"{adapter.source}: has no {min(untrained)}, and {base} has no trained one: "
                "there is nothing to predict with"
            )
        labels[name] = bank.labels(name) or model.config.label_names
        twice = [label for label in labels[name] if labels[name].count(label) > 1]
        if twice:
            raise ValueError(f"{adapter.source}: has two labels named {twice[0]}")
    return bank, labels


# ------------------------------------------------------------------------------------------------
# Predictions
# ------------------------------------------------------------------------------------------------


def tokenize(
    lines: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> tuple[list[dict[str, list[int]]], list[bool]]:
    """Tokenizes lines; returns the model's inputs for each, and whether its text was truncated."""
    rows: list[dict[str, list[int]]] = [{} for _ in lines]
    was_cut = [False] * len(lines)
    for keys in (("text",), ("text", "text_pair")):
        alike = [i for i, line in enumerate(lines) if ("text_pair" in line) is (len(keys) == 2)]
        for start in range(0, len(alike), AT_ONCE):
            chosen = alike[start : start + AT_ONCE]
            texts = [[lines[index][key] for index in chosen] for key in keys]
            encoded = tokenizer(*texts, truncation=True, max_length=max_length)
            for name, values in encoded.items():
                for index, value in zip(chosen, values, strict=True):
                    rows[index][name] = value
            cut = truncated_rows(tokenizer, texts, encoded["attention_mask"], max_length)
            for index, is_cut in zip(chosen, cut, strict=True):
                was_cut[index] = is_cut
    return rows, was_cut


def tokenize_words(
    lines: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> tuple[list[dict[str, list[int]]], list[bool], list[list[int | None]]]:
    """Tokenizes lines of words like `tokenize`, and also returns where each word begins.

    That is the position of its first token, or None for a word that was cut off.
    """
    rows: list[dict[str, list[int]]] = []
    was_cut: list[bool] = []
    firsts: list[list[int | None]] = []
    how: dict[str, Any] = {"is_split_into_words": True}
    for start in range(0, len(lines), AT_ONCE):
        words = [line["tokens"] for line in lines[start : start + AT_ONCE]]
        encoded = tokenizer(words, truncation=True, max_length=max_length, **how)
        was_cut += truncated_rows(tokenizer, [words], encoded["attention_mask"], max_length, **how)
        for row, of_row in enumerate(words):
            rows.append({name: values[row] for name, values in encoded.items()})
            places = first_tokens(encoded.word_ids(row))
            firsts.append([places.get(word) for word in range(len(of_row))])
    return rows, was_cut, firsts


def batches(lengths: Sequence[int], adapters: Sequence[str], size: int) -> Iterator[list[int]]:
    """Yields batches of row indices, the longest rows first, each batch sorted by adapter."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    for start in range(0, len(order), size):
        yield sorted(order[start : start + size], key=lambda index: adapters[index])


@torch.inference_mode()
def compute_logits(
    model: PreTrainedModel,
    bank: AdapterBank,
    adapters: Sequence[str],
    rows: Sequence[Mapping[str, list[int]]],
    collate: Callable[[list[Any]], Mapping[str, Any]],
    precision: Precision,
    batch_size: int,
) -> list[np.ndarray]:
    """Returns each row's logits in float32.

    They are (labels,) or, for token classification, (length, labels) with the padding of the row's
    batch. A row has as many labels as the widest head in its batch; those beyond its own are -inf.

    Args:
        model: the base.
        bank: the adapters over it.
        adapters: the name of each row's adapter.
        rows: each row's inputs of the model.
        collate: makes a batch of some rows.
        precision: the precision to compute in.
        batch_size: the number of rows per batch.
    """
    if precision.device_type == "cpu":
        choose_products(frozen_weights(model), precision.dtype, world_size=1, backward=False)
    logits: list[np.ndarray] = [np.empty(0)] * len(rows)
    lengths = [len(row["input_ids"]) for row in rows]
    with tqdm(total=len(rows), desc="predicting", unit="rows", disable=None) as bar:
        for chosen in batches(lengths, adapters, batch_size):
            inputs = collate([rows[index] for index in chosen])
            inputs = {name: part.to(precision.device_type) for name, part in inputs.items()}
            with bank.use([adapters[index] for index in chosen]), precision.autocast():
                output = model(**inputs)["logits"].float().cpu().numpy()
            for index, row in zip(chosen, output, strict=True):
                logits[index] = row
            bar.update(len(chosen))
    return logits


def answer(logits: np.ndarray, labels: Sequence[str]) -> dict[str, Any]:
    """Returns the likeliest label and all probabilities for a row, or a score.

    Args:
        logits: float32; one for each label, and possibly more after them.
        labels: the adapter's labels; with a single one, the head gives a score.
    """
    own = torch.from_numpy(logits[: len(labels)])
    if len(labels) == 1:
        return {"score": _shortest(own.numpy()[0])}
    probabilities = own.softmax(0).numpy()
    return {
        "label": labels[int(probabilities.argmax())],
        "probabilities": dict(zip(labels, map(_shortest, probabilities), strict=True)),
    }


def answer_words(
    logits: np.ndarray, labels: Sequence[str], firsts: Sequence[int | None]
) -> dict[str, Any]:
    """Returns the likeliest tag of each word, by its first token, and that tag's probability.

    Args:
        logits: (length, labels), float32; possibly with more labels than the adapter has.
        labels: the tags.
        firsts: the position of each word's first token, or None if it was cut off.
    """
    probabilities = torch.from_numpy(logits[:, : len(labels)]).softmax(1).numpy()
    best = [None if place is None else int(probabilities[place].argmax()) for place in firsts]
    both = list(zip(best, firsts, strict=True))
    return {
        "tags": [None if tag is None else labels[tag] for tag, _ in both],
        "probabilities": [
            None if tag is None else _shortest(probabilities[place, tag]) for tag, place in both
        ],
    }


def _shortest(value: np.float32) -> float:
    """Returns the shortest decimal that rounds to this float32: 0.93, not 0.930000007."""
    return float(str(value))


def main(argv: Sequence[str] | None = None) -> None:
    """Reads and checks the input, loads the model and the adapters, and writes the predictions."""
    args = parse_arguments(argv)
    set_up_logging(args.log_level)
    lines = read_lines(args.input_file, list(args.adapters))
    config = load_config(args)
    adapters = read_adapters(args, supported_family_of(config).family)
    head = head_of(adapters)
    source = _in_words(args.input_file)
    check_inputs(lines, head, source)
    check_texts(lines, adapters, source)
    texts = {key: [line.get(key, "none") for line in lines] for key in ("text", "text_pair")}
    warn_of_empty_texts(source, texts)
    of_words = INPUTS[head] == "tokens"
    tokenizer = load_tokenizer(args.model_name_or_path, config, of_words, **_where(args))
    is_pair = any("text_pair" in line for line in lines)
    length = choose_length(args.max_seq_length, config, tokenizer, is_pair)
    if of_words:
        rows, was_cut, firsts = tokenize_words(lines, tokenizer, length)
    else:
        rows, was_cut = tokenize(lines, tokenizer, length)
    report_truncation({"the input": (sum(was_cut), len(lines))}, length)
    check_output(args.output_file, args.input_file)

    model, precision = load_model(args, config, head)
    bank, labels = fill_bank(model, adapters, args.model_name_or_path)
    of_adapters = counted(len(adapters), "adapter")
    logger.info("%s for %s, on %s", counted(len(lines), "line"), of_adapters, model.device)
    chosen = [line["adapter"] for line in lines]
    collate = PackedCollator(DataCollatorWithPadding(tokenizer))
    logits = compute_logits(model, bank, chosen, rows, collate, precision, args.batch_size)
    own = [labels[name] for name in chosen]
    # One at a time, as all answers would take as much memory as all rows.
    if of_words:
        answers = (answer_words(*each) for each in zip(logits, own, firsts, strict=True))
    else:
        answers = (answer(*each) for each in zip(logits, own, strict=True))
    answered = (
        {**line, **its_answer, **({TRUNCATED: True} if is_cut else {})}
        for line, its_answer, is_cut in zip(lines, answers, was_cut, strict=True)
    )
    write_lines(args.output_file, answered)


if __name__ == "__main__":
    run_script(
        main,
        {
            AdapterAsModelError: lambda error: f"NAME={error.source}",
            ModelAsAdapterError: "run_glue.py --do_predict takes a model that was trained whole",
            FullModelError: "utils/split_lora.py takes the adapter out",
        },
    )
