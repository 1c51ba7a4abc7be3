"""Kills runs of NLU and NLG at random moments, again and again, and checks how they end.

    python tests/helpers/kill_many.py --kills 200

A run of a tiny model is started, killed (SIGKILL) after a random time, and started again by the
same command, until it ends; then the next run begins. After each kill every visible checkpoint has
to be whole; no start may end with an error; and each run has to end with the tensors of an
undisturbed run. Processes are forked from this one, which has imported all modules, so that they
start quickly.
"""

import argparse
import importlib.util
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "NLG" / "src"))

from compare import assert_same_bits  # noqa: E402

from loralib.adapters.formats import read_adapter  # noqa: E402
from loralib.io.tensors import read_tensors  # noqa: E402
from loralib.training import process  # noqa: E402


def load(path: Path):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Tree:
    """A script that is run and killed.

    Args:
        main: the script's main function.
        arguments: an output folder -> the script's command line.
        check: checks that all checkpoints in an output folder are whole.
        tensors: an output folder -> the tensors that a run ends with.
    """

    main: Callable[[list[str]], None]
    arguments: Callable[[Path], list[str]]
    check: Callable[[Path], None]
    tensors: Callable[[Path], dict[str, torch.Tensor]]


def glue_tree(folder: Path) -> Tree:
    """run_glue.py on two layers, with a checkpoint every other step and an evaluation an epoch."""
    # The script imports these when it needs them, which each process would do again.
    import datasets  # noqa: F401
    import sklearn.metrics  # noqa: F401

    script = load(ROOT / "examples" / "text-classification" / "run_glue.py")
    base, data = folder / "base", folder / "rows.csv"
    make_base(base)
    words, chance = ["good", "bad", "a", "dog", "song", "not", "very", "is"], random.Random(0)
    lines = ["sentence,label"]
    for _ in range(24):
        text = " ".join(chance.choices(words, k=6))
        lines.append(f"{text},{'yes' if 'good' in text else 'no'}")
    data.write_text("\n".join(lines) + "\n")

    def arguments(out: Path) -> list[str]:
        given = f"--model_name_or_path {base} --train_file {data} --validation_file {data} "
        given += "--do_train --do_eval --max_seq_length 20 --per_device_train_batch_size 4 "
        given += "--num_train_epochs 4 --learning_rate 1e-2 --save_steps 2 --save_total_limit 3 "
        given += "--evaluation_strategy epoch --logging_steps 1 --report_to none --disable_tqdm "
        given += f"--apply_lora --lora_r 4 --lora_alpha 8 --lora_dropout 0.1 --output_dir {out}"
        return given.split()

    def check(out: Path) -> None:
        for checkpoint in out.glob("checkpoint-*"):
            json.loads((checkpoint / "trainer_state.json").read_text())
            read_tensors(checkpoint / "pytorch_model.bin", verify=True)
            read_adapter(checkpoint)
            for name in ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "training_args.bin"):
                torch.load(checkpoint / name, weights_only=True)

    return Tree(
        script.main, arguments, check, lambda out: read_tensors(out / "pytorch_model.bin")[0]
    )


def make_base(folder: Path) -> None:
    """A RoBERTa of two layers, with a tokenizer of bytes."""
    from tokenizers import ByteLevelBPETokenizer

    from transformers import RobertaConfig, RobertaModel, RobertaTokenizerFast

    folder.mkdir()
    bpe = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    bpe.train_from_iterator(["a good dog"], 300, special_tokens=special, show_progress=False)
    tokenizer = RobertaTokenizerFast(*bpe.save_model(str(folder)), model_max_length=30)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    config = RobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=32,
        type_vocab_size=1,
    )
    RobertaModel(config, add_pooling_layer=False).save_pretrained(folder)


def gpt2_tree(folder: Path) -> Tree:
    """gpt2_ft.py on two layers, with a checkpoint every third step."""
    tiny = load(Path(__file__).with_name("tiny_gpt2_ft.py"))
    config = tiny.tiny_config_of("gpt2.xs", lora_attn_dim=2, lora_attn_alpha=8)
    trial = load(Path(__file__).with_name("gpt2_trial.py")).Trial(folder, config, 14)
    settings = "--max_epoch 12 --grad_acc 2 --save_interval 3 --eval_interval 4 --lora_dropout 0.3"

    def main(argv: list[str]) -> None:
        import checkpoints
        import gpt2_ft

        # They take seconds to import, and matplotlib takes longer if it has no cache yet.
        sys.modules["tensorboard"] = sys.modules["matplotlib"] = None
        checkpoints.config_of = tiny.tiny_config_of
        gpt2_ft.main(argv)

    def check(out: Path) -> None:
        for path in out.glob("model.*.pt"):
            read_tensors(path, verify=True)
        if (out / "resume.pt").exists():
            torch.load(out / "resume.pt", weights_only=True)

    def tensors(out: Path) -> dict[str, torch.Tensor]:
        return read_tensors(max(out.glob("model.*.pt"), key=lambda p: int(p.suffixes[0][1:])))[0]

    return Tree(main, lambda out: trial.flags(out, *settings.split(), "--resume"), check, tensors)


def attempt(tree: Tree, out: Path, log: Path, seconds: float | None = None) -> bool:
    """Runs a script in a process that is killed after `seconds`; returns whether it ended before.

    Raises:
        RuntimeError: it ended with an error.
    """
    child = os.fork()
    if child == 0:
        with open(log, "wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        try:
            process.run(lambda: tree.main(tree.arguments(out)), lambda line: print(line))
            sys.stdout.flush()
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        if end is not None and time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
        time.sleep(0.001)
    if status != 0:
        raise RuntimeError(
            f"a start ended with an error:\n{log.read_text(errors='replace')[-3000:]}"
        )
    return True


def kill_many(tree: Tree, folder: Path, kills: int, chance: random.Random) -> tuple[int, int]:
    """Runs the script until it was killed so often; returns the numbers of kills and of runs."""
    log, whole = folder / "log", folder / "whole"
    begun = time.monotonic()
    attempt(tree, whole, log)
    duration = time.monotonic() - begun
    expected, done, runs = tree.tensors(whole), 0, 0
    while done < kills:
        out = folder / f"run{runs}"
        runs += 1
        # Many are killed early, and each attempt comes a little further.
        while not attempt(tree, out, log, chance.uniform(0, duration)):
            done += 1
            tree.check(out)
        assert_same_bits(tree.tensors(out), expected)
        shutil.rmtree(out)
        print(f"{done} kills, {runs} runs", flush=True)
    return done, runs


TREES = {"glue": glue_tree, "gpt2": gpt2_tree}


def main(argv: list[str] | None = None) -> None:
    """Parses the flags, and kills runs of each tree."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200, help="over both trees")
    parser.add_argument("--trees", nargs="+", choices=TREES, default=list(TREES))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # a forked process has no other threads
    for name in args.trees:
        with tempfile.TemporaryDirectory() as folder:
            tree = TREES[name](Path(folder))
            share = -(-args.kills // len(args.trees))
            done, runs = kill_many(tree, Path(folder), share, random.Random(args.seed))
        print(f"{name}: {done} kills in {runs} runs, all with the bits of the whole run")


if __name__ == "__main__":
    main()
