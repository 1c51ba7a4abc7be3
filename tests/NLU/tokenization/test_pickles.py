"""Copies, pickles and hashes of tokenizers are stable: the caches of datasets rely on it."""

import copy
import os
import pickle

import pytest
from datasets import Dataset
from datasets.fingerprint import Hasher
from launches import fork_server
from tiny_tokenizer import CLS, FIXTURE, ids_of

from transformers import PreTrainedTokenizerBase, RobertaTokenizerFast


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))]
)
def test_copies(tokenizer, duplicate):
    other = duplicate(tokenizer)
    assert isinstance(other, PreTrainedTokenizerBase)
    assert ids_of(other) == ids_of(tokenizer)
    assert Hasher.hash(other) == Hasher.hash(tokenizer)
    assert pickle.dumps(other) == pickle.dumps(tokenizer)


@pytest.mark.parametrize(
    "settings",
    [
        {"padding": True},
        {"truncation": True, "max_length": 4},
        {"padding": "max_length", "truncation": True, "max_length": 4, "return_tensors": "pt"},
    ],
)
def test_calls_do_not_change_the_tokenizer(tokenizer, settings):
    before, pickled = Hasher.hash(tokenizer), pickle.dumps(tokenizer)
    tokenizer(["a b c", "d"], **settings)
    tokenizer.decode([CLS])
    _ = tokenizer.all_special_ids, repr(tokenizer)
    assert Hasher.hash(tokenizer) == before
    assert pickle.dumps(tokenizer) == pickled
    assert ids_of(tokenizer) == FIXTURE["strings"]["single"]


def test_hash_tells_tokenizers_apart(tiny):
    hashes = {
        Hasher.hash(RobertaTokenizerFast.from_pretrained(tiny, **settings))
        for settings in ({}, {"add_prefix_space": True}, {"model_max_length": 9})
    }
    assert len(hashes) == 3


@pytest.mark.slow
def test_hash_is_the_same_in_another_process(tokenizer, tiny):
    code = (
        "import sys; from datasets.fingerprint import Hasher\n"
        "from transformers import RobertaTokenizerFast as R\n"
        "print(Hasher.hash(R.from_pretrained(sys.argv[1])))"
    )
    result = fork_server("others").run(["-c", code, tiny], os.environ, timeout=300)
    assert result.stdout.strip() == Hasher.hash(tokenizer), result.stderr


def test_datasets_map_is_cached_across_calls(tokenizer):
    rows = Dataset.from_dict({"sentence": ["a b c", "d"]})

    def encode(examples):
        return tokenizer(examples["sentence"], truncation=True, max_length=4)

    first = rows.map(encode, batched=True)
    again = rows.map(encode, batched=True)
    assert first["input_ids"] == tokenizer(["a b c", "d"], truncation=True, max_length=4).input_ids
    assert first._fingerprint == again._fingerprint
