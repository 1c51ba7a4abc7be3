"""The metrics of E2E, WebNLG and DART: for each, the number that its shared task reports.

A corpus is a list of rows: `references[i]` are the texts that are right for row i, one or more,
and `predictions[i]` is the text to be judged. A metric takes both and gives one number. Where a row
has fewer references than others, the files of WebNLG and DART have an empty line. In the release
that is a reference of length 0 for BLEU, whose brevity penalty may choose it as the closest one,
and one at a rate of 1 for TER, so that `score` gives it to these two; to the other metrics it is
not a reference.

E2E is judged as in its challenge: BLEU and NIST by mteval-v13a, which lower-cases; METEOR, ROUGE-L
and CIDEr as in MS-COCO's caption evaluation, on Penn Treebank tokens without punctuation. WebNLG
and DART are judged by BLEU as multi-bleu-detok computes it, METEOR, TER by pyter and chrF++.

METEOR and the Treebank tokenizer are Java programs, which come with the package pycocoevalcap;
`missing_java` says what they lack. All else is Python.
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
# Fewer rows are scored before other processes have started.
TER_POOL_FROM = 100
# What MS-COCO's evaluation leaves out of the Treebank tokenizer's tokens.
PTB_PUNCTUATION = {*".?!,:;-'`", "''", "``", "--", "...", "-LRB-", "-RRB-", "-LCB-", "-RCB-"}


# ------------------------------------------------------------------------------------------------
# In Python
# ------------------------------------------------------------------------------------------------


def bleu(references: References, predictions: list[str]) -> float:
    """Corpus BLEU-4, 0 to 100, as multi-bleu-detok prints it: 0 if an order has no match.

    Tokens are mteval-v13a's. The brevity penalty compares each prediction with the reference of the
    closest length, of two that are as close with the shorter one. An empty reference counts, with
    length 0, as it does in multi-bleu; sacrebleu leaves out a None, and takes an empty text for a
    reference likewise.
    """
    return _corpus_bleu(references, predictions, smooth_method="none")


def mteval_bleu(references: References, predictions: list[str]) -> float:
    """Corpus BLEU-4, 0 to 1, as mteval-v13a prints it: in lower case, an empty order smoothed."""
    return _corpus_bleu(references, predictions, smooth_method="exp", lowercase=True) / 100


def _corpus_bleu(references: References, predictions: list[str], **settings: Any) -> float:
    # force: no warning about tokenised predictions, as the release's are.
    metric = BLEU(tokenize="13a", force=True, **settings)
    return metric.corpus_score(predictions, _streams(references)).score


def ter(references: References, predictions: list[str]) -> float:
    """Translation edit rate: edits and shifts per word of a reference; 0 is perfect.

    The mean over rows of the lowest rate to one of their references, by pyter, as the release's
    eval.py has it. (Tercom's, over a corpus, divides all edits by the average references' words.)
    Words are what stands between blanks, so that punctuation counts as a word only where the text
    has been tokenised; case counts. A reference without words is at a rate of 1, as in eval.py: a
    row that has one is never worse than that.
    """
    # A row takes up to seconds, so the rows are distributed over the processors.
    with ExitStack() as stack:
        rows = map(_lowest_rate, predictions, references)
        if len(predictions) >= TER_POOL_FROM:
            pool = stack.enter_context(ProcessPoolExecutor())
            rows = pool.map(_lowest_rate, predictions, references, chunksize=16)
        rates = list(tqdm(rows, "TER", len(predictions), unit="row", leave=False, disable=None))
    return sum(rates) / len(rates)


def _lowest_rate(prediction: str, row: list[str]) -> float:
    """The edit rate to the nearest reference of a row."""
    system, rights = prediction.split(), [reference.split() for reference in row]
    return min(pyter.ter(system, right) if right else 1.0 for right in rights)


def chrf(references: References, predictions: list[str]) -> float:
    """chrF++, 0 to 1, as the release's chrF++.py counts it.

    The mean of F2 over the eight orders, characters up to 6 and words up to 2, of which one without
    n-grams counts as 0. (sacrebleu's own chrF++ is the F2 of precision and recall averaged over the
    orders that have some.) A tab is a blank here, where chrF++.py takes it for a character.
    """
    metric = CHRF(word_order=2, eps_smoothing=True)
    return metric.corpus_score(predictions, _streams(references)).score / 100


def _streams(references: References) -> list[list[str | None]]:
    """The rows' first references, second references…, with None where a row has no more."""
    return [list(stream) for stream in zip_longest(*references)]


def nist(references: References, predictions: list[str]) -> float:
    """NIST of order 5 as mteval-v13a computes it (Doddington 2002, equation 3): 0 and up.

    A matching n-gram is worth log2(occurrences of its first n − 1 words / its own), counted over
    all references (for one word: words of all references / occurrences). The score is the sum over
    n of worth of the matches per predicted n-gram, times a penalty for short predictions.

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
    """All n-grams of 1 to NIST_ORDER words."""
    for n in range(1, NIST_ORDER + 1):
        for start in range(len(words) - n + 1):
            yield tuple(words[start : start + n])


def _nist_penalty(ratio: float) -> float:
    """1 for predictions as long as the references, 1/2 where they are 2/3 as long, 0 for none."""
    if ratio <= 0:
        return 0.0
    beta = math.log(0.5) / math.log(1.5) ** 2
    return math.exp(beta * math.log(min(ratio, 1.0)) ** 2)


# ------------------------------------------------------------------------------------------------
# In Java
# ------------------------------------------------------------------------------------------------


def missing_java() -> str | None:
    """What METEOR and the Treebank tokenizer lack here and how to get it; None if nothing."""
    missing = []
    if importlib.util.find_spec("pycocoevalcap") is None:
        missing.append(
            "the package pycocoevalcap is not installed "
            "(pip install -r requirements-java.txt, in NLG; 104 MB)"
        )
    # Some systems have a program of this name that only says where to get Java.
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
    """Both, as lower-case Penn Treebank tokens joined by blanks, without punctuation.

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
    """METEOR 1.5 for English with its normalisation (``-l en -norm``), 0 to 1.

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
    """ROUGE-L as in MS-COCO's evaluation, 0 to 1; takes `ptb_tokens`."""
    from pycocoevalcap.rouge.rouge import Rouge

    return float(Rouge().compute_score(*_by_row(references, predictions))[0])


def cider(references: References, predictions: list[str]) -> float:
    """CIDEr as in MS-COCO's evaluation, 0 to 10; takes `ptb_tokens`."""
    from pycocoevalcap.cider.cider import Cider

    return float(Cider().compute_score(*_by_row(references, predictions))[0])


def _by_row(
    references: References, predictions: list[str]
) -> tuple[dict[int, list[str]], dict[int, list[str]]]:
    return dict(enumerate(references)), {i: [text] for i, text in enumerate(predictions)}


def _lines(texts: Iterable[str]) -> str:
    """One text a line; what any program might take for the end of a line becomes a blank."""
    return "".join(" ".join(text.split()) + "\n" for text in texts)


def _jar(name: str) -> Path:
    """A file of the package pycocoevalcap."""
    spec = importlib.util.find_spec("pycocoevalcap")
    return Path(next(iter(spec.submodule_search_locations)), name)


def _java(*arguments: str, text: str = "") -> str:
    """Runs Java with `text` as its input; what it printed.

    Raises:
        ValueError: it ended with an error.
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
    """One number of a task's table.

    Attributes:
        label: its name in print.
        score: references and predictions to the number.
        scale: what its values mean.
        decimals: how many are printed.
        java: it needs Java.
        ptb: it is given `ptb_tokens`, for which Java is needed as well.
        counts_empty: it is given empty references, too.
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
    """All `metrics` of a corpus by label; None, and one warning, where Java is missing.

    Every row needs a reference that is not empty.
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
