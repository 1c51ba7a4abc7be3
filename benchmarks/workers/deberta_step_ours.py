"""Times a training step of this project's DeBERTa-v2."""

from functools import partial

import our_encoder
from our_encoder import VERSIONS, make_batch
from timing import run

from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

make_step = partial(our_encoder.make_step, DebertaV2Config, DebertaV2ForSequenceClassification)

if __name__ == "__main__":
    run(make_step, make_batch, VERSIONS)
