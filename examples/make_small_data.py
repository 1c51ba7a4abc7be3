"""Makes the small data of the quickstart: a corpus, and a sentiment task in GLUE's format.

    python examples/make_small_data.py --output_dir DIR

    DIR/corpus.txt                   for masked language modeling, one sentence per line
    DIR/SST-2/{train,dev,test}.tsv   for run_glue.py --task_name sst2 --data_dir DIR

All sentences are reviews from one small grammar, in the lower case and spacing of SST-2. A review
is positive (1) or negative (0). A model has to learn the meaning of the adjectives, and a little
composition: "the plot was not bad at all" is positive, and after "although the plot was superb , …"
the last clause decides.

Half of the adjectives (`UNSEEN_SHARE`) never occur in train.tsv, but do in dev.tsv, test.tsv and
the corpus. In the corpus, a review ends in a verdict, "… : recommended .". A model that learns to
fill in masked words of the corpus learns from these which adjectives belong together. So LoRA on
such a base generalizes to words that the training set does not show. On a random base it cannot.

No sentence of one split is in another, and none of dev.tsv or test.tsv is in the corpus, not even
as part of a line. The same seed gives the same bytes.
"""

import logging
import random
from dataclasses import dataclass
from pathlib import Path

from loralib.io.atomic import atomic_write
from loralib.io.command_line import ArgumentParser, summary
from loralib.training import process

logger = logging.getLogger(__name__)

CORPUS_LINES = 12_000
TRAIN_ROWS, DEV_ROWS, TEST_ROWS = 1000, 500, 500
POSITIVE_SHARE = 0.54
"""Share of positive rows in each split: the accuracy of always saying "positive"."""
UNSEEN_SHARE = 0.5
"""Share of the adjectives of either polarity that the training set leaves out."""


def _words(text: str) -> list[str]:
    return text.split()


POSITIVE = _words(
    "admirable beautiful charming delightful enjoyable fantastic flawless glorious great "
    "inspired lovely masterful nice pleasant remarkable solid stellar superb touching witty"
)
NEGATIVE = _words(
    "abysmal appalling bad broken clumsy disappointing dreary feeble forgettable horrible "
    "irritating lousy miserable pathetic ridiculous shallow stale terrible unbearable weak"
)


@dataclass(frozen=True)
class Topic:
    """A topic of reviews.

    Args:
        things: the names of the things that are reviewed.
        parts: the aspects of a thing that reviews judge.
    """

    things: list[str]
    parts: list[str]


def _phrases(text: str) -> list[str]:
    return [phrase.strip() for phrase in text.split("/")]


TOPICS = [
    Topic(
        _phrases("film / movie / comedy / thriller / documentary"),
        _phrases("plot / acting / script / cast / ending / soundtrack / dialogue / camera work"),
    ),
    Topic(
        _phrases("novel / book / biography / story / memoir"),
        _phrases("style / opening / hero / language / chapter on the war / translation / cover"),
    ),
    Topic(
        _phrases("hotel / guest house / hostel / resort"),
        _phrases("room / staff / breakfast / pool / view / bed / location / lobby"),
    ),
    Topic(
        _phrases("restaurant / cafe / bistro / diner"),
        _phrases("soup / waiter / wine / dessert / menu / bread / fish / sauce / coffee"),
    ),
    Topic(
        _phrases("album / concert / opera / recording"),
        _phrases("singer / melody / band / rhythm / orchestra / sound / final song / choir"),
    ),
    Topic(
        _phrases("phone / laptop / camera / tablet"),
        _phrases("screen / battery / keyboard / design / software / manual / speaker / lens"),
    ),
]

OPENINGS = _phrases(
    "in my view / to be honest / this time / on the whole / as for me / on our visit / last week / "
    "in the end"
)
INTENSIFIERS = ["very", "really", "truly", "quite", "so", "rather", "simply", "utterly"]
VERBS = _phrases("was / was / was / felt / seemed / turned out to be")
NEGATIONS = _phrases(
    "was not {} / was not {} at all / was never {} / was hardly {} / was far from {} / "
    "was anything but {} / did not seem {} / was by no means {}"
)
VERDICTS = {0: ["avoid", "worthless"], 1: ["recommended", "worthwhile"]}

Adjectives = dict[int, list[str]]
"""The adjectives to choose from, by label: 0 negative, 1 positive."""


def clause(rng: random.Random, adjectives: Adjectives, part: str, label: int) -> str:
    """Makes a judgment of a part: `the soup was very bland` or, negated, `… was far from bland`."""
    kind = rng.random()
    if kind < 0.1:
        said = rng.choice(NEGATIONS).format(rng.choice(adjectives[1 - label]))
        return f"the {part} {said}"
    words = rng.sample(adjectives[label], 2)
    said = words[0]
    if kind < 0.3:
        said = f"{rng.choice(INTENSIFIERS)} {words[0]}"
    elif kind < 0.7:
        said = f"{words[0]} and {words[1]}"
    return f"the {part} {rng.choice(VERBS)} {said}"


def review(rng: random.Random, adjectives: Adjectives, label: int) -> str:
    """Makes a review without its period; `label` is its overall sentiment."""
    topic = rng.choice(TOPICS)
    first, second = rng.sample(topic.parts, 2)
    last = clause(rng, adjectives, second, label)
    kind = rng.random()
    if kind < 0.1:
        opposite = clause(rng, adjectives, first, 1 - label)
        template = rng.choice(("although {} , {}", "{} , but {}", "{} , yet {}", "even if {} , {}"))
        return template.format(opposite, last)
    if kind < 0.4:
        return f"{clause(rng, adjectives, first, label)} and {last}"
    if kind < 0.7:
        opening = rng.choice(("this", "what a"))
        return f"{opening} {rng.choice(adjectives[label])} {rng.choice(topic.things)} : {last}"
    if kind < 0.85:
        return f"{rng.choice(OPENINGS)} {last}"
    return last


def corpus_line(rng: random.Random, adjectives: Adjectives) -> str:
    """Makes a line of the corpus: adjectives, a judgment or a review, then the verdict."""
    label, kind = rng.randrange(2), rng.random()
    if kind < 0.4:
        said = " and ".join(rng.sample(adjectives[label], 2))
    elif kind < 0.7:
        part = rng.choice(rng.choice(TOPICS).parts)
        said = f"the {part} was {rng.choice(adjectives[label])}"
    else:
        said = review(rng, adjectives, label)
    return f"{said} : {rng.choice(VERDICTS[label])} ."


def make_rows(
    rng: random.Random, adjectives: Adjectives, count: int, taken: set[str]
) -> list[tuple[str, int]]:
    """Makes a split of the task: shuffled rows (sentence, label).

    Sentences in `taken` are not used again, and those of the split are added to it.
    """
    rows: list[tuple[str, int]] = []
    for label, until in ((1, round(POSITIVE_SHARE * count)), (0, count)):
        while len(rows) < until:
            sentence = review(rng, adjectives, label) + " ."
            if sentence not in taken:
                taken.add(sentence)
                rows.append((sentence, label))
    rng.shuffle(rows)
    return rows


def seen_adjectives(rng: random.Random, adjectives: Adjectives) -> Adjectives:
    """Chooses the adjectives that the training set may use."""
    return {
        label: rng.sample(words, round(len(words) * (1 - UNSEEN_SHARE)))
        for label, words in adjectives.items()
    }


def make_corpus(rng: random.Random, adjectives: Adjectives, held_out: list[str]) -> list[str]:
    """Makes the corpus, in which no line contains a sentence of `held_out`."""
    # Compared without the period, as sentences may continue in the corpus.
    held_out = [sentence.removesuffix(" .") for sentence in held_out]
    lines = []
    while len(lines) < CORPUS_LINES:
        line = corpus_line(rng, adjectives)
        if not any(sentence in line for sentence in held_out):
            lines.append(line)
    return lines


def write_lines(path: Path, lines: list[str]) -> None:
    """Writes `lines` as a UTF-8 file."""
    with atomic_write(path) as temporary:
        temporary.write_bytes("".join(f"{line}\n" for line in lines).encode())


def main(argv: list[str] | None = None) -> None:
    """Makes and writes the data."""
    parser = ArgumentParser(description=summary(__doc__))
    parser.add_argument("--output_dir", type=Path, required=True, help="folder for the files")
    parser.add_argument("--seed", type=int, default=0, help="another seed makes other data")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    rng = random.Random(args.seed)
    adjectives = {0: NEGATIVE, 1: POSITIVE}
    taken: set[str] = set()
    train = make_rows(rng, seen_adjectives(rng, adjectives), TRAIN_ROWS, taken)
    dev = make_rows(rng, adjectives, DEV_ROWS, taken)
    test = make_rows(rng, adjectives, TEST_ROWS, taken)
    corpus = make_corpus(rng, adjectives, [sentence for sentence, _ in dev + test])

    task = args.output_dir / "SST-2"
    task.mkdir(parents=True, exist_ok=True)
    write_lines(args.output_dir / "corpus.txt", corpus)
    for name, rows in (("train", train), ("dev", dev)):
        lines = [f"{sentence}\t{label}" for sentence, label in rows]
        write_lines(task / f"{name}.tsv", ["sentence\tlabel", *lines])
    lines = [f"{index}\t{sentence}" for index, (sentence, _) in enumerate(test)]
    write_lines(task / "test.tsv", ["index\tsentence", *lines])
    logger.info(
        "%s: %s lines; %s: %s + %s + %s rows",
        args.output_dir / "corpus.txt",
        len(corpus),
        task,
        len(train),
        len(dev),
        len(test),
    )


if __name__ == "__main__":
    process.run(main)
