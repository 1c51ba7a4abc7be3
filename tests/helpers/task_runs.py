"""What the tests of run_ner.py, run_qa.py and run_swag.py share: small data, command lines.

A tiny model can learn each task, because single words determine the answer.
"""

import json
import random
from pathlib import Path

from glue_runs import LORA, write
from paths import ROOT

SCRIPTS = {
    "ner": ROOT / "examples" / "token-classification" / "run_ner.py",
    "qa": ROOT / "examples" / "question-answering" / "run_qa.py",
    "swag": ROOT / "examples" / "multiple-choice" / "run_swag.py",
}
PLAIN = ["the", "a", "this", "is", "was", "sees", "finds", "likes", "very", "often", "warm", "and"]
ANIMALS, PLACES = ["dog", "cat", "teacher"], ["house", "river", "window"]


def sentence_rows(chance: random.Random, count: int) -> list[dict]:
    """Animals are entities of one type, and places of another."""
    rows = []
    for _ in range(count):
        words = chance.choices([*PLAIN, *ANIMALS, *PLACES], k=chance.randint(3, 9))
        tags = ["B-ANI" if w in ANIMALS else "B-PLA" if w in PLACES else "O" for w in words]
        rows.append({"tokens": words, "ner_tags": tags})
    return rows


def question_rows(chance: random.Random, count: int, none: float = 0.0) -> list[dict]:
    """The answer is the one place in a text; a share of the texts has none."""
    rows = []
    for number in range(count):
        words = chance.choices([*PLAIN, *ANIMALS], k=chance.randint(5, 12))
        place = chance.choice(PLACES)
        has_one = chance.random() >= none
        if has_one:
            words.insert(chance.randrange(1, len(words)), place)
        text = " ".join(words)
        start = text.index(f" {place}") + 1 if has_one else 0
        found = {"text": [place], "answer_start": [start]}
        answers = found if has_one else {"text": [], "answer_start": []}
        row = {"id": f"q{number}", "question": "where is this", "context": text}
        rows.append({**row, "answers": answers})
    return rows


def choice_rows(chance: random.Random, count: int, endings: int = 3) -> list[dict]:
    """The right ending is the one with an animal in it."""
    rows = []
    for _ in range(count):
        label = chance.randrange(endings)
        texts = [
            " ".join([chance.choice(PLAIN), chance.choice(words)])
            for words in (ANIMALS if n == label else PLACES for n in range(endings))
        ]
        row = {"sent1": " ".join(chance.choices(PLAIN, k=2)), "sent2": "this is"}
        row |= {f"ending{n}": text for n, text in enumerate(texts)}
        rows.append({**row, "label": label})
    return rows


ROWS = {"ner": sentence_rows, "qa": question_rows, "swag": choice_rows}


def write_data(task: str, folder: Path, suffix: str = ".json", **settings) -> list:
    """Flags for three files of a task: 60 rows to train, 16 to evaluate, 9 to predict."""
    chance, flags = random.Random(5), []
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 60), ("validation", 16), ("test", 9)):
        rows = ROWS[task](chance, count, **settings)
        if suffix == ".csv":
            rows = [
                {n: v if isinstance(v, str | int) else json.dumps(v) for n, v in row.items()}
                for row in rows
            ]
        flags += [f"--{split}_file", write(folder / f"{split}{suffix}", rows)]
    return flags


def command(base: Path, out: Path, *flags: object) -> list[str]:
    """A script's arguments: eight updates an epoch, a checkpoint in the middle of the second."""
    common = f"--model_name_or_path {base} --max_seq_length 40 --report_to none --disable_tqdm "
    common += "--per_device_train_batch_size 8 --learning_rate 1e-2 --logging_steps 4 "
    common += f"--save_steps 12 --output_dir {out}"
    return [*common.split(), *LORA, *map(str, flags)]
