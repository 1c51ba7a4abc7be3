"""Generates a text after each context of an encoded file, by beam search.

    python -m torch.distributed.launch --nproc_per_node=1 src/gpt2_beam.py --platform local \\
        --data data/e2e/test.jsonl --init_checkpoint base.bin --lora_path model.26290.pt …

--init_checkpoint is the base and --lora_path the LoRA trained on it; a whole model.<step>.pt, which
holds both, is given as --init_checkpoint alone.

--output_file, in --work_dir, gets one line for each line of --data, in the same order:
{"id": number of the line, "predict": [token ids with the end token, padded with 0 to --eval_len],
"length": of the text without padding, so that gpt2_decode.py finds its end, "context_digest": a
digest of the context, by which gpt2_decode.py checks its input}.
Lines with the same context share one search. Several processes share the contexts.
"""

import argparse
import logging
import os
from collections.abc import Sequence

if __name__ == "__main__":
    from loralib.training.process import begin

    begin()

from tqdm.auto import tqdm

import loralib as lora
from beam import BeamSettings, search
from checkpoints import open_model
from encoded import END_OF_TEXT_ID, check_in_vocabulary, context_digest, read_encoded, token_ids
from gpu import DistEnv, add_gpu_params, check_same_flags, start
from json_lines import write_json_lines
from lora_flags import add_model_params, check_model_params
from loralib.io.atomic import check_apart, check_folder_writable
from loralib.io.command_line import ArgumentParser, check_bounds
from loralib.io.digests import lines_digest
from loralib.nn.products import MANY_ROWS, use_products
from loralib.training import launcher_env, watch
from loralib.training.agreement import check_alike, check_same_weights
from loralib.training.determinism import set_up_device
from loralib.training.distributed import gather_objects
from loralib.training.precision import check_precision, compute_dtype
from loralib.training.product_choices import choose_products, frozen_weights
from model import GPT2LMModel
from script import add_log_level, run, set_up_logging

logger = logging.getLogger(__name__)

Prompt = tuple[int, ...]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line.

    Raises:
        ValueError: a number is out of its bounds.
    """
    parser = ArgumentParser(description=__doc__)
    _add_data_params(parser)
    _add_search_params(parser)
    _add_precision_params(parser)
    add_model_params(parser, default_card="gpt2.sm")
    parser.add_argument_group("LoRA").add_argument(
        "--lora_path",
        help="the LoRA adapter, if --init_checkpoint is only the base: a model.<step>.pt, or any "
        "other format, such as a folder of PEFT's or its name on the hub",
    )
    add_gpu_params(parser)
    add_log_level(parser)
    group = parser.add_argument_group("accepted as in the release, where they have no effect")
    group.add_argument("--random_seed", type=int, default=10)
    args = parser.parse_args(argv)
    check_bounds("--batch_size", args.batch_size, least=1)
    check_model_params(args)
    return args


def _add_data_params(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("data").add_argument
    add("--data", default="../data/wikitext-103", help="lines as gpt2_encode.py writes them")
    add("--batch_size", type=int, default=10, help="contexts searched at a time, in each process")
    add(
        "--seq_len",
        type=int,
        default=512,
        help="most tokens of context and text; longer contexts lose their beginning",
    )
    add(
        "--work_dir",
        default=os.environ.get("PT_OUTPUT_DIR", "gpt2_model"),
        help="folder for the output; default: $PT_OUTPUT_DIR, or gpt2_model",
    )
    add("--output_file", default="beam_prediction.jsonl", help="the predictions, in --work_dir")


def _add_search_params(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("search").add_argument
    add("--beam", type=int, default=1, help="beams per context; 1: greedy search")
    add("--eval_len", type=int, default=256, help="most tokens of a text")
    add("--min_length", type=int, default=0, help="fewest tokens of a text before its end")
    add(
        "--length_penalty",
        type=float,
        default=1.0,
        help="texts compete by sum of log-probabilities / length^length_penalty",
    )
    add(
        "--no_repeat_ngram_size",
        type=int,
        default=4,
        help="no sequence of this many tokens occurs twice in a text; 0: no limit",
    )
    add(
        "--repetition_penalty",
        type=float,
        default=1.0,
        help="divides positive and multiplies negative logits of a text's own tokens; 1: off",
    )
    add(
        "--eos_token_id",
        action="append",
        type=int,
        default=[END_OF_TEXT_ID],
        help=f"a token that ends a text, besides {END_OF_TEXT_ID}, such as 628, a blank line; "
        "may be given several times",
    )


def _add_precision_params(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tf32", action="store_true", help="compute float32 in TensorFloat-32 (GPU)"
    )
    half = parser.add_mutually_exclusive_group().add_argument
    half("--fp16", action="store_true", help="compute in half precision (GPU)")
    half("--bf16", action="store_true", help="compute in bfloat16")


def settings_of(args: argparse.Namespace) -> BeamSettings:
    """Returns the settings of the search that the flags ask for.

    Raises:
        ValueError: a flag is out of its range.
    """
    if args.seq_len <= args.eval_len:
        raise ValueError(
            f"--seq_len {args.seq_len} leaves no token for a context next to --eval_len "
            f"{args.eval_len}"
        )
    if args.min_length > args.eval_len:
        raise ValueError(
            f"--min_length {args.min_length} is more than --eval_len {args.eval_len}, the most "
            "tokens that a text has"
        )
    if args.min_length == args.eval_len:
        logger.warning(
            "--min_length is --eval_len, %d: no text can end before it has that many tokens",
            args.eval_len,
        )
    try:
        return BeamSettings(
            beam=args.beam,
            eval_len=args.eval_len,
            length_penalty=args.length_penalty,
            no_repeat_ngram_size=args.no_repeat_ngram_size,
            repetition_penalty=args.repetition_penalty,
            min_length=args.min_length,
            eos_token_ids=tuple(args.eos_token_id),
        )
    except ValueError as error:
        raise ValueError(f"--{error}") from error


def model_to_decode(args: argparse.Namespace, dist_env: DistEnv) -> GPT2LMModel:
    """Returns the model that the flags ask for, with LoRA merged into its weights.

    Raises:
        CheckpointError: a file cannot be read, or does not fit the flags or the other file.
        ValueError: base or LoRA are missing; or the model has too few positions; or the device does
            not support the precision.
        TrainingError: another process has other weights.
    """
    check_precision(args.fp16, args.bf16, dist_env.device)
    if args.init_checkpoint is None and args.lora_path is None:
        raise ValueError("no model given: use --init_checkpoint")
    model, base = open_model(args, args.lora_path)
    if args.lora_dim > 0 and args.lora_path is None and not any("lora_" in n for n in base.tensors):
        raise ValueError(
            f"--lora_dim {args.lora_dim}, but {args.init_checkpoint} holds a base without LoRA: "
            "give the file with LoRA's part as --lora_path"
        )
    if args.seq_len > model.config.n_positions:
        raise ValueError(
            f"--seq_len {args.seq_len}: the model has {model.config.n_positions} positions; give "
            "at most that"
        )
    # Before merging, because the last bits of merged weights depend on the processor.
    check_same_weights(model, dist_env.world_size)
    dtype = compute_dtype(args.fp16, args.bf16)
    return lora.merge(model).to(dist_env.device, dtype).eval().requires_grad_(False)


def prepare_products(model: GPT2LMModel, beams: int, world_size: int) -> None:
    """Chooses how the search multiplies with the model's weights, all of which are frozen.

    Args:
        model: a model on a CPU.
        beams: the number of beams of all prompts in a batch.
        world_size: the number of processes; all of them have to call this.
    """
    use_products(model)
    dtype = model.transformer.wte.weight.dtype
    # More rows give the same choices, but the head's logits may then take minutes and gigabytes.
    rows = min(beams, MANY_ROWS)
    choose_products(frozen_weights(model), dtype, world_size, rows, backward=False)


def read_contexts(path: str, vocab_size: int) -> list[Prompt]:
    """Reads the contexts of an encoded file.

    Args:
        path: JSON lines with ``"context": [ids]``.
        vocab_size: the vocabulary's size; ids have to be below it.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line has no context of token ids within the vocabulary.
    """
    contexts: list[Prompt] = []
    for number, row in enumerate(read_encoded(path), start=1):
        where = f"{path}:{number}"
        ids = token_ids(row, "context", where)
        if not ids:
            raise ValueError(f"{where}: the context is empty")
        check_in_vocabulary(ids, vocab_size, where)
        contexts.append(tuple(ids))
    return contexts


def check_same_contexts(path: str, world_size: int) -> None:
    """Checks that all processes have the same contexts, since each decodes a part of them.

    Raises:
        TrainingError: a process has other contexts.
    """
    if world_size > 1:
        check_alike({"contexts of --data": lines_digest(path)}, world_size)


def cut_contexts(contexts: list[Prompt], longest: int, path: str) -> list[Prompt]:
    """Cuts contexts longer than `longest` to their last tokens, with a warning.

    Args:
        contexts: the contexts of a file.
        longest: the largest number of tokens.
        path: the file, for the warning.
    """
    cut = sum(len(context) > longest for context in contexts)
    if cut and launcher_env.rank() == 0:
        logger.warning(
            "%s: %d of %d contexts are longer than --seq_len - --eval_len = %d tokens, and lost "
            "their beginning",
            *(path, cut, len(contexts), longest),
        )
    return [context[-longest:] for context in contexts]


def decode(
    model: GPT2LMModel,
    prompts: Sequence[Prompt],
    settings: BeamSettings,
    batch_size: int,
    dist_env: DistEnv,
) -> dict[Prompt, list[int]]:
    """Generates a text for each distinct prompt; the processes share the work.

    Args:
        model: the model on this process's device.
        prompts: all prompts, the same on all processes.
        settings: the settings of the search.
        batch_size: the number of prompts searched at a time.
        dist_env: this process.

    Returns:
        On every process, the texts of all prompts.
    """
    # Prompts of similar length are searched together. The longest come first, because they need the
    # most memory.
    distinct = sorted(set(prompts), key=lambda prompt: (-len(prompt), prompt))
    share = distinct[dist_env.rank :: dist_env.world_size]
    texts = {}
    hidden = not dist_env.is_main or None  # None: hidden if there is no terminal
    with tqdm(total=len(share), desc="decode", unit="context", disable=hidden) as bar:
        for begin in range(0, len(share), batch_size):
            batch = share[begin : begin + batch_size]
            texts.update(zip(batch, search(model, batch, settings), strict=True))
            bar.update(len(batch))
            watch.beat()
    parts = gather_objects(texts, dist_env.world_size)
    return {prompt: text for part in parts for prompt, text in part.items()}


def _prepare(path: str, data: str) -> None:
    """Makes the output's folder, and checks before the search that the output can be written."""
    check_apart([path], [data])
    if os.path.isdir(path):
        raise IsADirectoryError(f"--output_file {path} is a folder")
    folder = os.path.dirname(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    check_folder_writable(folder)


def main(argv: list[str] | None = None) -> None:
    """Decodes as the command line says.

    Raises:
        OSError, ValueError: a file cannot be read, or what it holds does not fit; nothing is
            written then.
    """
    args = parse_args(argv)
    settings = settings_of(args)
    dist_env = start(args)
    set_up_logging(args.log_level)
    check_same_flags(args, dist_env)
    set_up_device(tf32=args.tf32)
    path = os.path.join(args.work_dir, args.output_file)
    if dist_env.is_main:
        _prepare(path, args.data)
    model = model_to_decode(args, dist_env)
    longest = args.seq_len - args.eval_len
    contexts = read_contexts(args.data, model.config.vocab_size)
    prompts = cut_contexts(contexts, longest, args.data)
    if dist_env.device.type == "cpu":
        share = -(-len(set(prompts)) // dist_env.world_size)
        beams = min(args.batch_size, share) * settings.beam
        prepare_products(model, beams, dist_env.world_size)
    check_same_contexts(args.data, dist_env.world_size)
    texts = decode(model, prompts, settings, args.batch_size, dist_env)
    if not dist_env.is_main:
        return
    write_json_lines(
        path,
        (
            {
                "id": number,
                "predict": texts[prompt] + [0] * (args.eval_len - len(texts[prompt])),
                "length": len(texts[prompt]),
                "context_digest": context_digest(context),
            }
            for number, (context, prompt) in enumerate(zip(contexts, prompts, strict=True))
        ),
    )
    logger.info("wrote %s: %d contexts, %d of them distinct", path, len(prompts), len(texts))


if __name__ == "__main__":
    run(main)
