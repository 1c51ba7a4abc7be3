"""Rows for the scores: references, and predictions that are better and worse."""

import math

from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

REFERENCES = [
    ["The Punter is a cheap pub.", "A pub called The Punter is cheap ."],
    ["Loch Fyne serves French food for £20.", "French food is served at Loch Fyne.", "Loch Fyne!"],
    ["Aromi is a coffee shop in the city centre by the river."],
]
PERFECT = [row[0] for row in REFERENCES]
WORSE = ["The Punter is a pub.", "Loch Fyne serves food for £20.", "Aromi is a shop in the city."]
WORST = ["Punter cheap.", "food", "The the the."]


def plain_bleu(references, predictions):
    """Corpus BLEU from its definition (Papineni et al. 2002) on mteval-v13a's tokens.

    Each prediction's length is compared with that of the reference closest in length, and of two
    equally close ones with the shorter, as multi-bleu does. Empty references have length 0.
    """
    split = Tokenizer13a()

    def grams(words, n):
        return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]

    found, possible, length, closest = [0] * 4, [0] * 4, 0, 0
    for row, prediction in zip(references, predictions, strict=True):
        system, targets = split(prediction).split(), [split(text).split() for text in row]
        length += len(system)
        closest += sorted((abs(len(words) - len(system)), len(words)) for words in targets)[0][1]
        for n in range(4):
            of_system = grams(system, n + 1)
            possible[n] += len(of_system)
            for gram in set(of_system):
                most = max(grams(words, n + 1).count(gram) for words in targets)
                found[n] += min(of_system.count(gram), most)
    precision = math.prod(f / p for f, p in zip(found, possible, strict=True)) ** (1 / 4)
    return 100 * precision * math.exp(min(0, 1 - closest / length))
