"""Fixtures of the tokenizer tests: RoBERTa's tiny tokenizer and captured warnings."""

import logging
import shutil
from pathlib import Path

import make_tokenizer_fixture as maker
import pytest
from tiny_tokenizer import FIXTURE

from transformers import RobertaTokenizerFast


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A folder with vocab.json, merges.txt and special_tokens_map.json, for reading only."""
    folder = tmp_path_factory.mktemp("tiny")
    return maker.write_vocabulary(folder, FIXTURE["vocabulary"], FIXTURE["merges"])


@pytest.fixture
def folder(tiny, tmp_path) -> Path:
    """A copy of `tiny` that a test may change."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


@pytest.fixture
def tokenizer(tiny) -> RobertaTokenizerFast:
    return RobertaTokenizerFast.from_pretrained(tiny)


@pytest.fixture
def warnings(caplog):
    """Captures the package's warnings, in a caplog."""
    with caplog.at_level(logging.WARNING, logger="transformers"):
        yield caplog
