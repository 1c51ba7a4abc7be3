"""Makes what quickstart.sh leaves, with very small models."""

import random
from pathlib import Path

from paths import load_script


def make_base_and_task(folder: Path) -> Path:
    """Writes ``base`` and ``data`` into a folder; returns the folder."""
    rng = random.Random(0)
    words = ["the", "soup", "film", "was", "very", "not", "good", "bad", "great", "and", "but"]
    texts = [" ".join(rng.choices(words, k=rng.randint(3, 9))) for _ in range(60)]
    (folder / "corpus.txt").write_text("\n".join(texts) + "\n")
    shape = "--vocab_size 300 --hidden_size 16 --num_hidden_layers 2 --num_attention_heads 2"
    shape += " --intermediate_size 16 --max_seq_length 20 --max_steps 1 --do_train --no_cuda"
    load_script("examples/language-modeling/run_mlm.py").main(
        [
            *("--train_file", str(folder / "corpus.txt"), "--output_dir", str(folder / "base")),
            *("--report_to", "none", "--disable_tqdm", "--save_strategy", "no", *shape.split()),
        ]
    )
    (folder / "data" / "SST-2").mkdir(parents=True)
    for split, rows in (("train", texts[:40]), ("dev", texts[40:])):
        lines = [f"{text}\t{int('good' in text or 'great' in text)}" for text in rows]
        path = folder / "data" / "SST-2" / f"{split}.tsv"
        path.write_text("\n".join(["sentence\tlabel", *lines]) + "\n")
    return folder


def add_lora_run(folder: Path, epochs: int) -> None:
    """Writes ``sst2``, a LoRA run on what `make_base_and_task` has written, and ``lora.bin``."""
    load_script("examples/text-classification/run_glue.py").main(
        [
            *("--model_name_or_path", str(folder / "base"), "--task_name", "sst2"),
            *("--data_dir", str(folder / "data"), "--output_dir", str(folder / "sst2")),
            *("--do_train", "--do_eval", "--evaluation_strategy", "epoch", "--no_cuda"),
            *("--num_train_epochs", str(epochs), "--learning_rate", "0.01", "--disable_tqdm"),
            *("--max_seq_length", "20", "--apply_lora", "--lora_r", "8", "--lora_alpha", "16"),
            *(
                "--report_to",
                "none",
                "--save_strategy",
                "no",
                "--per_device_train_batch_size",
                "16",
            ),
        ]
    )
    load_script("utils/split_lora.py").main(
        [str(folder / "sst2" / "pytorch_model.bin"), str(folder / "lora.bin")]
    )
