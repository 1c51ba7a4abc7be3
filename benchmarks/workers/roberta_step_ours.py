"""Times a training step of this project's RoBERTa."""

from functools import partial

import our_encoder
from our_encoder import VERSIONS, make_batch
from timing import run

from transformers import RobertaConfig, RobertaForSequenceClassification

make_step = partial(our_encoder.make_step, RobertaConfig, RobertaForSequenceClassification)

if __name__ == "__main__":
    run(make_step, make_batch, VERSIONS)
