"""Makes a small data-to-text corpus in E2E's format, and a vocabulary for it in GPT-2's format.

    python examples/make_small_e2e.py --output_dir DIR

    DIR/{train,valid,test}.txt          lines ``meaning representation||text``, as in E2E
    DIR/vocab/{encoder.json,vocab.bpe}  a byte-level BPE trained on train.txt

A meaning representation lists attributes of a restaurant. Each comes with several texts from one
small grammar. No meaning representation of one split is in another. The vocabulary has a few
hundred tokens. Two have the ids that GPT-2's scripts rely on: 628 for the blank line, 50256 for the
end of a text. The same seed gives the same bytes.
"""

import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer

from loralib.io.atomic import atomic_write
from loralib.io.command_line import ArgumentParser
from loralib.training import process

logger = logging.getLogger(__name__)

SPLITS = {"train": 700, "valid": 50, "test": 60}
"""Meaning representations in each split."""
TEXTS_EACH = 4
BLANK_LINE, END_OF_TEXT = 628, 50256

NAMES = (
    "Blue Lantern",
    "Copper Kettle",
    "Dove Cottage",
    "Green Gate",
    "Harbour View",
    "Iron Bridge",
    "Little Anchor",
    "Mill House",
    "Old Orchard",
    "Quiet Fox",
    "Silver Spoon",
    "Stone Arch",
    "Three Elms",
    "Willow Bank",
)
NEAR = ("Corn Exchange", "Grand Hotel", "Market Hall", "Rose Theatre", "Tower Bakery")
VALUES = {
    "Type": ("restaurant", "pub", "coffee shop"),
    "food": ("Chinese", "English", "French", "Indian", "Italian"),
    "price": ("cheap", "moderate", "high"),
    "area": ("riverside", "city centre"),
    "family friendly": ("yes", "no"),
    "near": NEAR,
}
OPTIONAL = tuple(name for name in VALUES if name != "Type")


def _meaning(rng: random.Random) -> dict[str, str]:
    """Makes a meaning: name, type, and two to four other attributes in the order of `VALUES`."""
    chosen = {"Type", *rng.sample(OPTIONAL, k=rng.randint(2, 4))}
    meaning = {"name": rng.choice(NAMES)}
    return meaning | {key: rng.choice(VALUES[key]) for key in VALUES if key in chosen}


PRICES = {"cheap": "cheap", "moderate": "moderately priced", "high": "expensive"}
FAMILY = {
    "yes": ("It is family friendly .", "Children are welcome ."),
    "no": ("It is not family friendly .", "It is not for children ."),
}


def _text(meaning: dict[str, str], rng: random.Random) -> str:
    """Makes one or two sentences that state all attributes of a meaning."""
    name, noun, place = meaning["name"], _noun(meaning), _place(meaning, rng)
    article = "an" if noun[0] in "aeiouAEIOU" else "a"
    templates = [
        f"{name} is {article} {noun} {place}",
        f"{place} there is {article} {noun} called {name}",
        f"the {noun} {name} is {place}" if place else f"there is {article} {noun} , {name}",
    ]
    words = f"{rng.choice(templates)} .".split()
    if "family friendly" in meaning:
        words.append(rng.choice(FAMILY[meaning["family friendly"]]))
    return " ".join([words[0][0].upper() + words[0][1:], *words[1:]])


def _noun(meaning: dict[str, str]) -> str:
    """Returns a noun phrase such as ``cheap French pub``."""
    price = PRICES.get(meaning.get("price", ""), "")
    return " ".join(f"{price} {meaning.get('food', '')} {meaning['Type']}".split())


def _place(meaning: dict[str, str], rng: random.Random) -> str:
    """Returns a place such as ``by the riverside near Tower Bakery``, or ""."""
    places = []
    if "area" in meaning:
        preposition = "by" if meaning["area"] == "riverside" else "in"
        places.append(f"{preposition} the {meaning['area']}")
    if "near" in meaning:
        places.append(f"{rng.choice(['near', 'close to'])} {meaning['near']}")
    return " ".join(places)


def _lines(meanings: list[dict[str, str]], rng: random.Random) -> Iterator[str]:
    for meaning in meanings:
        source = " | ".join(f"{key} : {value}" for key, value in meaning.items())
        for text in sorted({_text(meaning, rng) for _ in range(TEXTS_EACH)}):
            yield f"{source}||{text}"


def make_corpus(seed: int) -> dict[str, list[str]]:
    """Makes the lines of each split."""
    rng = random.Random(seed)
    distinct: dict[tuple, dict[str, str]] = {}
    while len(distinct) < sum(SPLITS.values()):
        meaning = _meaning(rng)
        distinct[tuple(meaning.items())] = meaning
    meanings = iter(distinct.values())
    return {
        split: list(_lines([next(meanings) for _ in range(count)], rng))
        for split, count in SPLITS.items()
    }


def write_vocabulary(folder: Path, texts: list[str]) -> None:
    """Trains a byte-level BPE on `texts`, and writes it in GPT-2's two files."""
    bpe = ByteLevelBPETokenizer()
    # The last merge, of two line ends, gets the id of GPT-2's blank line.
    bpe.train_from_iterator(texts, vocab_size=BLANK_LINE, show_progress=False)
    model = json.loads(bpe.to_str())["model"]
    vocabulary = model["vocab"] | {"ĊĊ": BLANK_LINE, "<|endoftext|>": END_OF_TEXT}
    merges = [*(" ".join(pair) for pair in model["merges"]), "Ċ Ċ"]
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "encoder.json", json.dumps(vocabulary))
    _write(folder / "vocab.bpe", "#version: 0.2\n" + "\n".join(merges) + "\n")


def _write(path: Path, text: str) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def main(argv: list[str] | None = None) -> None:
    """Makes the files that this module's docstring lists."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", type=Path, required=True, help="folder for the files")
    parser.add_argument("--seed", type=int, default=0, help="another seed makes another corpus")
    args = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    corpus = make_corpus(args.seed)
    for split, lines in corpus.items():
        _write(args.output_dir / f"{split}.txt", "\n".join(lines) + "\n")
    write_vocabulary(args.output_dir / "vocab", corpus["train"])
    sizes = ", ".join(f"{len(lines)} lines for {split}" for split, lines in corpus.items())
    logger.info("%s: %s", args.output_dir, sizes)


if __name__ == "__main__":
    process.run(main)
