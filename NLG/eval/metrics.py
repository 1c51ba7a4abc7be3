"""Computes the metrics of E2E, WebNLG and DART as their shared tasks report them.

A corpus is a list of rows: `references[i]` are the reference texts of row i, one or more, and
`predictions[i]` is the text to score. A metric takes both and returns one number.

If a row has fewer references than others, the files of WebNLG and DART have an empty line. In the
release, BLEU counts that as a reference of length 0, which its brevity penalty may choose as the
closest one, and TER counts it as a reference with a rate of 1. So `score` passes empty references
to these two. The other metrics do not get them.

E2E is scored as in its challenge: BLEU and NIST by mteval-v13a, which lower-cases; METEOR, ROUGE-L
and CIDEr as in MS-COCO's caption evaluation, on Penn Treebank tokens without punctuation. WebNLG
and DART are scored by BLEU as multi-bleu-detok computes it, METEOR, TER by pyter and chrF++.

METEOR and the Treebank tokenizer are Java programs in the package pycocoevalcap. `missing_java`
says what is missing to run them. All else is Python.
"""

import importlib.util
import logging
import math
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pyter
from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a
from tqdm.auto import tqdm

logger = logging.getLogger(__name__)

References = list[list[str]]
Words = list[str]
Ngram = tuple[str, ...]

NIST_ORDER = 5
# Fewer rows are scored sooner than other processes would start.
TER_POOL_FROM = 100
# The tokens of the Treebank tokenizer that MS-COCO's evaluation leaves out.
PTB_PUNCTUATION = {*".?!,:;-'`", "''", "``", "--", "...", "-LRB-", "-RRB-", "-LCB-", "-RCB-"}


# ------------------------------------------------------------------------------------------------
# In Python
# ------------------------------------------------------------------------------------------------


def bleu(references: References, predictions: list[str]) -> float:
    """Computes corpus BLEU-4, 0 to 100, as multi-bleu-detok does: 0 if an order has no match.

    Tokens are mteval-v13a's. The brevity penalty compares each prediction with the reference of the
    closest length, or the shorter one of two that are equally close. An empty reference counts,
    with length 0, as in multi-bleu and in sacrebleu (which leaves out only None).
    """
    return _corpus_bleu(references, predictions, smooth_method="none")


def mteval_bleu(references: References, predictions: list[str]) -> float:
    """Computes lower-case corpus BLEU-4, 0 to 1, as mteval-v13a does: empty orders are smoothed."""
    return _corpus_bleu(references, predictions, smooth_method="exp", lowercase=True) / 100


def _corpus_bleu(references: References, predictions: list[str], **settings: Any) -> float:
    # force: no warning about predictions that are tokenized already, as the release's are.
    metric = BLEU(tokenize="13a", force=True, **settings)
    return metric.corpus_score(predictions, _streams(references)).score


def ter(references: References, predictions: list[str]) -> float:
    """Computes the translation edit rate: edits and shifts per reference word; 0 is perfect.

    The result is the mean over rows of the lowest rate to any of the row's references, by pyter, as
    in the release's eval.py. (Tercom divides the edits of a corpus by its average reference length
    instead.) Words are separated by blanks, so punctuation counts as a word only if the text has
    been tokenized. Case counts. A reference without words has a rate of 1, as in eval.py, so a row
    that has one is never worse than that.
    """
    # A row may take seconds, so the rows are distributed over the processors.
    with ExitStack() as stack:
        rows = map(_lowest_rate, predictions, references)
        if len(predictions) >= TER_POOL_FROM:
            pool = stack.enter_context(ProcessPoolExecutor())
            rows = pool.map(_lowest_rate, predictions, references, chunksize=16)
        rates = list(tqdm(rows, "TER", len(predictions), unit="row", leave=False, disable=None))
    return sum(rates) / len(rates)


def _lowest_rate(prediction: str, row: list[str]) -> float:
    """Returns the edit rate to the nearest reference of a row."""
    system, rights = prediction.split(), [reference.split() for reference in row]
    return min(pyter.ter(system, right) if right else 1.0 for right in rights)


def chrf(references: References, predictions: list[str]) -> float:
    """Computes chrF++, 0 to 1, as the release's chrF++.py does.

    The result is the mean of F2 over eight orders, characters up to 6 and words up to 2. An order
    without n-grams counts as 0. (By default, sacrebleu averages precision and recall over the
    orders that have n-grams, and computes F2 from these.) A tab is a blank here, but a character in
    chrF++.py.
    """
    metric = CHRF(word_order=2, eps_smoothing=True)
    return metric.corpus_score(predictions, _streams(references)).score / 100


def _streams(references: References) -> list[list[str | None]]:
    """Returns the rows' first references, second references…, with None where a row has no more."""
    return [list(stream) for stream in zip_longest(*references)]


def nist(references: References, predictions: list[str]) -> float:
    """Computes NIST of order 5 as mteval-v13a does (Doddington 2002, equation 3): 0 and up.

    A matching n-gram is worth log2(occurrences of its first n − 1 words / its own), counted over
    all references (for one word: words of all references / occurrences). The score is the sum over
    n of (the matches' total worth / the number of predicted n-grams), times a penalty for short
    predictions.

    Raises:
        ValueError: the references hold no words, so that they have no length.
    """
    tokenize = Tokenizer13a()

    def words(text: str) -> Words:
        return tokenize(text.lower()).split()

    rows = [[words(reference) for reference in row] for row in references]
    occurrences = Counter(ngram for row in rows for ref in row for ngram in _ngrams(ref))
    occurrences[()] = sum(len(reference) for row in rows for reference in row)

    worth = [0.0] * NIST_ORDER
    predicted = [0] * NIST_ORDER
    average_length = 0.0
    for row, prediction in zip(rows, map(words, predictions), strict=True):
        allowed: Counter[Ngram] = Counter()
        for reference in row:
            allowed |= Counter(_ngrams(reference))
        for ngram, matches in (Counter(_ngrams(prediction)) & allowed).items():
            information = math.log2(occurrences[ngram[:-1]] / occurrences[ngram])
            worth[len(ngram) - 1] += matches * information
        for n in range(NIST_ORDER):
            predicted[n] += max(len(prediction) - n, 0)
        average_length += sum(map(len, row)) / len(row)

    if not average_length:
        raise ValueError("NIST: the references hold no words, only markup, which is dropped")
    score = sum(gain / max(count, 1) for gain, count in zip(worth, predicted, strict=True))
    return score * _nist_penalty(predicted[0] / average_length)


def _ngrams(words: Words) -> Iterator[Ngram]:
    """Yields all n-grams of 1 to NIST_ORDER words."""
    for n in range(1, NIST_ORDER + 1):
        for start in range(len(words) - n + 1):
            yield tuple(words[start : start + n])


def _nist_penalty(ratio: float) -> float:
    """Returns 1 for predictions as long as the references, 1/2 if 2/3 as long, 0 for none."""
    if ratio <= 0:
        return 0.0
    beta = math.log(0.5) / math.log(1.5) ** 2
    return math.exp(beta * math.log(min(ratio, 1.0)) ** 2)


# ------------------------------------------------------------------------------------------------
# In Java
# ------------------------------------------------------------------------------------------------


def missing_java() -> str | None:
    """Returns what METEOR and the Treebank tokenizer lack and how to get it; None if nothing."""
    missing = []
    if importlib.util.find_spec("pycocoevalcap") is None:
        missing.append(
            "the package pycocoevalcap is not installed "
            "(pip install -r requirements-java.txt, in NLG; 104 MB)"
        )
    # Some systems have a program called java that only says where to get Java.
    if (
        shutil.which("java") is None
        or subprocess.run(["java", "-version"], capture_output=True, check=False).returncode != 0
    ):
        missing.append(
            "there is no Java runtime (conda install -c conda-forge openjdk, "
            "or apt install default-jre-headless)"
        )
    return "; ".join(missing) or None


def ptb_tokens(references: References, predictions: list[str]) -> tuple[References, list[str]]:
    """Returns both as lower-case Penn Treebank tokens joined by blanks, without punctuation.

    Raises:
        ValueError: the tokenizer failed.
    """
    texts = [text for row in references for text in row] + predictions
    # The package's own wrapper writes next to its jar, and pairs lines without counting them.
    output = _java(
        *("-cp", str(_jar("tokenizer/stanford-corenlp-3.4.1.jar"))),
        *("edu.stanford.nlp.process.PTBTokenizer", "-preserveLines", "-lowerCase"),
        text=_lines(texts),
    )
    lines = output.removesuffix("\n").split("\n")
    if len(lines) != len(texts):
        raise ValueError(f"the Treebank tokenizer gave {len(lines)} lines for {len(texts)} texts")
    tokenized = iter(
        " ".join(token for token in line.split(" ") if token not in PTB_PUNCTUATION)
        for line in lines
    )
    return [[next(tokenized) for _ in row] for row in references], list(tokenized)


def meteor(references: References, predictions: list[str]) -> float:
    """Computes METEOR 1.5 for English with its normalization (``-l en -norm``), 0 to 1.

    Raises:
        ValueError: the program failed.
    """
    most = max(map(len, references))
    # A row's best reference counts, so that repeating one changes nothing.
    padded = [text for row in references for text in row + row[:1] * (most - len(row))]
    with tempfile.TemporaryDirectory() as folder:
        for name, texts in (("predictions", predictions), ("references", padded)):
            Path(folder, name).write_text(_lines(texts), encoding="utf-8")
        output = _java(
            *("-Xmx2G", "-jar", str(_jar("meteor/meteor-1.5.jar"))),
            *(f"{folder}/predictions", f"{folder}/references"),
            *("-l", "en", "-norm", "-r", str(most), "-q"),
        )
    return float(output)


def rouge_l(references: References, predictions: list[str]) -> float:
    """Computes ROUGE-L as in MS-COCO's evaluation, 0 to 1, from the result of `ptb_tokens`."""
    from pycocoevalcap.rouge.rouge import Rouge

    return float(Rouge().compute_score(*_by_row(references, predictions))[0])


def cider(references: References, predictions: list[str]) -> float:
    """Computes CIDEr as in MS-COCO's evaluation, 0 to 10, from the result of `ptb_tokens`.

    Raises:
        ValueError: the references hold no words, so that none has a weight.
    """
    if not any(map(any, references)):
        raise ValueError("CIDEr: the references hold no words, only punctuation, which is dropped")
    from pycocoevalcap.cider.cider import Cider

    return float(Cider().compute_score(*_by_row(references, predictions))[0])


def _by_row(
    references: References, predictions: list[str]
) -> tuple[dict[int, list[str]], dict[int, list[str]]]:
    return dict(enumerate(references)), {i: [text] for i, text in enumerate(predictions)}


def _lines(texts: Iterable[str]) -> str:
    """Returns one text per line; characters that a program may take as a line end become blanks."""
    return "".join(" ".join(text.split()) + "\n" for text in texts)


def _jar(name: str) -> Path:
    """Returns the path of a file in the package pycocoevalcap."""
    spec = importlib.util.find_spec("pycocoevalcap")
    return Path(next(iter(spec.submodule_search_locations)), name)


def _java(*arguments: str, text: str = "") -> str:
    """Runs Java with `text` as its input, and returns what it printed.

    Raises:
        ValueError: Java ended with an error.
    """
    result = subprocess.run(
        ["java", "-Dfile.encoding=UTF-8", *arguments],
        input=text,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    if result.returncode != 0:
        said = " ".join(result.stderr.split())[:300] or "it printed nothing"
        raise ValueError(f"java {' '.join(arguments)} ended with {result.returncode}: {said}")
    return result.stdout


# ------------------------------------------------------------------------------------------------
# The metrics of each task
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Metric:
    """A metric of a task.

    Attributes:
        label: the printed name.
        score: computes the metric from references and predictions.
        scale: the range of its values.
        decimals: how many decimals are printed.
        java: whether it needs Java.
        ptb: whether it takes the result of `ptb_tokens`, which needs Java as well.
        counts_empty: whether it gets empty references, too.
    """

    label: str
    score: Callable[[References, list[str]], float]
    scale: str = "0-1"
    decimals: int = 4
    java: bool = False
    ptb: bool = False
    counts_empty: bool = False


E2E = {
    "bleu": Metric("BLEU", mteval_bleu),
    "nist": Metric("NIST", nist, scale="0 and up"),
    "meteor": Metric("METEOR", meteor, java=True, ptb=True),
    "rouge_l": Metric("ROUGE_L", rouge_l, java=True, ptb=True),
    "cider": Metric("CIDEr", cider, scale="0-10", java=True, ptb=True),
}
WEBNLG_AND_DART = {
    "bleu": Metric("BLEU", bleu, scale="0-100", decimals=2, counts_empty=True),
    "meteor": Metric("METEOR", meteor, java=True),
    "ter": Metric("TER", ter, scale="0 and up, less is better", counts_empty=True),
    "chrf++": Metric("chrF++", chrf),
}


def score(
    metrics: Iterable[Metric], references: References, predictions: list[str]
) -> dict[str, float | None]:
    """Computes all `metrics` of a corpus, by label; None, with one warning, if Java is missing.

    Every row needs at least one reference that is not empty.
    """
    metrics = list(metrics)
    unable = missing_java() if any(metric.java for metric in metrics) else None
    if unable:
        skipped = ", ".join(metric.label for metric in metrics if metric.java)
        logger.warning("skipped: %s: %s", skipped, unable)
    filled = [[text for text in row if text] for row in references]
    tokenized = None
    if not unable and any(metric.ptb for metric in metrics):
        tokenized = ptb_tokens(filled, predictions)

    def number(metric: Metric) -> float | None:
        if metric.java and unable:
            return None
        if metric.ptb:
            return metric.score(*tokenized)
        return metric.score(references if metric.counts_empty else filled, predictions)

    return {metric.label: number(metric) for metric in metrics}
