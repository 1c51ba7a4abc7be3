"""Models from the hub: a local server stands in for it, and new processes load from it."""

import json
import os
from pathlib import Path

import pytest
import torch
from compare import rounding
from encoder_options import ENCODER_TERMS
from hub_process import run_on_hub
from safetensors.torch import save_file

from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    RobertaConfig,
    RobertaForSequenceClassification,
)

LETTERS = ["<s>", "<pad>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz", "Ġ", "<mask>"]
SHAPE = {
    "vocab_size": len(LETTERS),
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 20,
    "type_vocab_size": 1,
}
TEXT = "a small hub"

# Each call of show() prints a line of JSON: its result, or the error's type and message.
PRELUDE = """
import json, os, time
waits = []
time.sleep = waits.append  # between attempts to reach a hub that is not there
import huggingface_hub.constants  # reads the switches of offline mode now, before they change
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

def show(function, *args, **kwargs):
    try:
        print(json.dumps(function(*args, **kwargs)), flush=True)
    except (OSError, ValueError) as error:
        print(json.dumps([type(error).__name__, str(error)]), flush=True)

def logits(name, **where):
    model = AutoModelForSequenceClassification.from_pretrained(name, **where)
    tokenizer = AutoTokenizer.from_pretrained(name, **where)
    assert AutoConfig.from_pretrained(name, **where).num_labels == 3
    batch = tokenizer(["a small hub"], return_tensors="pt")
    return model(**batch).logits.tolist()
"""


def publish(hub, name, format):
    """Puts a model with a tokenizer into the hub; the weights' `format` is as in `FILES`."""
    torch.manual_seed(0)
    model = RobertaForSequenceClassification(RobertaConfig(**SHAPE, num_labels=3))
    for parameter in model.parameters():
        parameter.data.normal_()
    folder = hub.root / name
    model.save_pretrained(folder, safe_serialization=format != "bin")
    if format == "shards":
        tensors = {name: t.clone() for name, t in model.state_dict().items()}
        weight_map = {}
        for number, part in enumerate((sorted(tensors)[:9], sorted(tensors)[9:]), start=1):
            shard = f"model-{number:05}-of-00002.safetensors"
            save_file({name: tensors[name] for name in part}, folder / shard)
            weight_map |= dict.fromkeys(part, shard)
        (folder / "model.safetensors").unlink()
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(LETTERS)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return folder


FILES = {
    "bin": {"pytorch_model.bin"},
    "safetensors": {"model.safetensors"},
    "shards": {
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    },
}


def expected_logits(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer([TEXT], return_tensors="pt")
    assert batch["input_ids"].shape == (1, 13)
    return AutoModelForSequenceClassification.from_pretrained(folder)(**batch).logits.tolist()


def close(logits: list[float]):
    return pytest.approx(logits, abs=rounding(torch.tensor(logits), ENCODER_TERMS), rel=0)


@pytest.mark.slow
def test_download_then_cache_then_offline(hub_server, tmp_path):
    names = {format: f"org/{format}" for format in FILES}
    folders = {format: publish(hub_server, name, format) for format, name in names.items()}
    expected = [close(expected_logits(folder)[0]) for folder in folders.values()]
    code = "".join(f"show(lambda: logits({name!r})[0])\n" for name in names.values())
    home = tmp_path / "home"

    assert run_on_hub(hub_server, home, PRELUDE + code) == expected
    downloaded = [request.path for request in hub_server.downloads()]
    assert len(downloaded) == len(set(downloaded))
    for format, name in names.items():
        fetched = {p.rsplit("/", 1)[1] for p in downloaded if p.startswith(f"/{name}/")}
        assert fetched == {"config.json", "vocab.json", "merges.txt", *FILES[format]}

    hub_server.requests.clear()
    assert run_on_hub(hub_server, home, PRELUDE + code) == expected
    assert hub_server.requests
    assert hub_server.downloads() == []

    hub_server.requests.clear()
    assert run_on_hub(hub_server, home, PRELUDE + code, HF_HUB_OFFLINE="1") == expected
    assert hub_server.requests == []

    # The hub does not answer any more: first with offline mode on, then with it off.
    gone = f"""
os.environ["TRANSFORMERS_OFFLINE"] = "1"
{code}
show(lambda: len(waits))
show(logits, "org/none")
del os.environ["TRANSFORMERS_OFFLINE"]
{code}
show(logits, "org/none")
show(logits, "roberta-base")
"""
    shown = run_on_hub(hub_server, home, PRELUDE + gone, HF_ENDPOINT="http://127.0.0.1:9")
    assert shown[:4] == [*expected, 0]
    assert shown[5:8] == expected
    where = f"; as a path it was looked for in {os.getcwd()}"
    refused = [
        ("org/none", "offline mode is on and it is not in the cache", shown[4]),
        ("org/none", f"[Errno 111] Connection refused{where}", shown[8]),
        ("roberta-base", "[Errno 111] Connection refused", shown[9]),
    ]
    for name, reason, (error, message) in refused:
        assert error == "FileNotFoundError"
        assert message == (
            f"'{name}' is not a local folder and cannot be fetched: {reason}; without "
            "internet, copy its folder here and give the path instead of the name"
        )


@pytest.mark.slow
def test_revisions_tokens_and_errors(hub_server, tmp_path):
    folder = publish(hub_server, "org/tiny", "safetensors")
    publish(hub_server, "org/secret", "safetensors")
    hub_server.tokens["org/secret"] = "hf_open"
    (hub_server.root / "org" / "empty").mkdir()
    (hub_server.root / "org" / "empty" / "notes.txt").write_text("nothing here")
    bare = hub_server.root / "org" / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((folder / "config.json").read_text())
    cache = str(tmp_path / "own cache")
    code = f"""
from huggingface_hub import HfApi
show(logits, "org/tiny", revision="main", cache_dir={cache!r})
show(logits, "org/tiny", revision=HfApi().model_info("org/tiny").sha, cache_dir={cache!r})
show(logits, "org/secret", use_auth_token="hf_open")
for name, where in (
    ("org/tiny", {{"revision": "v2"}}),
    ("org/secret", {{"cache_dir": {cache!r}}}),
    ("org/secret", {{"cache_dir": {cache!r}, "use_auth_token": "hf_wrong"}}),
    ("org/none", {{}}),
    ("org/empty", {{}}),
    ("org/bare", {{}}),
):
    show(logits, name, **where)
os.environ["HF_TOKEN"] = "hf_open"
show(logits, "org/secret", cache_dir={cache!r}, use_auth_token=True)
"""
    shown = run_on_hub(hub_server, tmp_path / "home", PRELUDE + code)
    logits = close(expected_logits(folder)[0])
    for result in (*shown[:3], shown[-1]):
        assert result[0] == logits
    assert Path(cache).is_dir()
    private = "is neither a local folder nor a model on the hub (a private one needs"
    messages = (
        "'org/tiny' has no revision 'v2' on the hub",
        f"'org/secret' {private}",
        f"'org/secret' {private}",
        f"'org/none' {private}",
        "'org/empty' has no config.json, so it is not a model folder",
        "'org/bare' has no weights: neither model.safetensors nor pytorch_model.bin",
    )
    assert len(shown) == 4 + len(messages)
    for (error, message), expected in zip(shown[3:-1], messages, strict=True):
        assert error == "OSError"
        assert expected in message
        assert "\n" not in message
