"""Tests gpt2_beam.py, from files to predictions, and its errors about bad input."""

import argparse
import json
import logging
import os
import sys
from pathlib import Path

import pytest
import torch

import gpt2_beam
from beam import BeamSettings, search
from checkpoints import Base, open_model, save_model
from encoded import context_digest
from family import TARGETS
from lora_flags import add_model_params
from loralib.adapters.adapter import Adapter
from loralib.adapters.formats import read_adapter, write_adapter
from loralib.adapters.metadata import LoraMetadata
from loralib.errors import CheckpointError
from loralib.io.tensors import read_tensors
from loralib.nn import processor, products
from loralib.nn.linear_methods import METHODS
from loralib.training import product_choices
from model import GPT2LMModel, config_of
from weights import canonical_names

SCRIPT = Path(gpt2_beam.__file__)
CONTEXTS = [[5, 9, 2], [7], [5, 9, 2], [4, 4, 50000, 11, 3], [7], [3, 1], [5, 9, 2]]


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """A folder with a base, LoRA for it, both in one file, and LoRA without metadata (old.pt)."""
    folder = tmp_path_factory.mktemp("beam")
    torch.manual_seed(2)
    model = GPT2LMModel(config_of("gpt2.xs"))
    with torch.no_grad():
        for parameter in model.transformer.h.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    save_model(folder / "base.pt", model, Base({}), lora_only=False)
    flags = ["--model_card", "gpt2.xs", "--init_checkpoint", f"{folder / 'base.pt'}"]
    parser = argparse.ArgumentParser()
    add_model_params(parser)
    args = parser.parse_args([*flags, "--lora_dim", "4", "--lora_alpha", "32"])
    model, base = open_model(args)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    save_model(folder / "lora.pt", model, base, lora_only=True)
    save_model(folder / "whole.pt", model, base, lora_only=False)
    torch.save({"model_state_dict": read_adapter(folder / "lora.pt").tensors}, folder / "old.pt")
    write_contexts(folder / "data.jsonl", CONTEXTS)
    return folder


def write_contexts(path: Path, contexts: list) -> None:
    path.write_text("".join(json.dumps({"context": context}) + "\n" for context in contexts))


@pytest.fixture
def decode(files, tmp_path, one_process):
    """Runs the script and returns its predictions; flags are added to the usual ones."""

    def run(*more: object, data: Path | None = None) -> list[list[int]]:
        gpt2_beam.main(flags(files, tmp_path, data or files / "data.jsonl", *more))
        return read(tmp_path / "out.jsonl")

    return run


def flags(files: Path, work_dir: Path, data: Path, *more: object) -> list[str]:
    usual = ["--platform", "local", "--model_card", "gpt2.xs", "--beam", 3]
    usual += ["--init_checkpoint", files / "base.pt", "--seq_len", 1024, "--eval_len", 6]
    usual += ["--data", data, "--work_dir", work_dir, "--output_file", "out.jsonl"]
    return [str(word) for word in (*usual, *more)]


def read(path: Path) -> list[list[int]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["id"] for row in rows] == list(range(len(rows)))
    assert all(row.keys() == {"id", "predict", "length", "context_digest"} for row in rows)
    return [row["predict"] for row in rows]


def expected(files: Path, name: str, contexts: list, settings: BeamSettings) -> list[list[int]]:
    """Returns predictions of one search per context, by a model whose LoRA is not merged."""
    args = argparse.Namespace(
        model_card="gpt2.xs", init_checkpoint=str(files / name), lora_dim=None, lora_alpha=None
    )
    model = open_model(args)[0].eval()
    texts = [search(model, [context], settings)[0] for context in contexts]
    return [text + [0] * (settings.eval_len - len(text)) for text in texts]


def test_defaults_are_the_releases():
    args = vars(gpt2_beam.parse_args([]))
    wanted = dict(
        data="../data/wikitext-103",
        batch_size=10,
        seq_len=512,
        eval_len=256,
        min_length=0,
        model_card="gpt2.sm",
        init_checkpoint=None,
        beam=1,
        length_penalty=1.0,
        no_repeat_ngram_size=4,
        repetition_penalty=1.0,
        eos_token_id=[50256],
        output_file="beam_prediction.jsonl",
        work_dir="gpt2_model",
        platform="k8s",
    )
    assert wanted.items() <= args.items()


def test_end_tokens_add_up_within_a_call_only():
    more = ["--eos_token_id", "628", "--eos_token_id", "13"]
    assert gpt2_beam.parse_args(more).eos_token_id == [50256, 628, 13]
    assert gpt2_beam.parse_args(more[:2]).eos_token_id == [50256, 628]
    assert gpt2_beam.parse_args([]).eos_token_id == [50256]


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_each_context_gets_a_prediction(decode, files, batch_size):
    settings = BeamSettings(3, 6, 1.0, 4, 1.0, 0, (50256,))
    texts = decode("--batch_size", batch_size)
    assert texts == expected(files, "base.pt", CONTEXTS, settings)


def test_each_distinct_context_is_searched_once_the_longest_first(decode, monkeypatch):
    searched = []

    def spy(model, prompts, settings):
        searched.append(prompts)
        return search(model, prompts, settings)

    monkeypatch.setattr(gpt2_beam, "search", spy)
    texts = decode("--batch_size", 3)
    assert searched == [[(4, 4, 50000, 11, 3), (5, 9, 2), (3, 1)], [(7,)]]
    assert texts[0] == texts[2] == texts[6]
    assert texts[1] == texts[4] != texts[0]


def test_flags_reach_the_search(decode, monkeypatch):
    seen = []

    def spy(model, prompts, settings):
        seen.append(settings)
        return [[1]] * len(prompts)

    monkeypatch.setattr(gpt2_beam, "search", spy)
    more = ["--beam", 2, "--eval_len", 5, "--min_length", 3, "--length_penalty", 0.8]
    more += ["--no_repeat_ngram_size", 2, "--repetition_penalty", 1.5, "--eos_token_id", 628]
    assert decode(*more) == [[1, 0, 0, 0, 0]] * len(CONTEXTS)
    assert seen == [BeamSettings(2, 5, 0.8, 2, 1.5, 3, (50256, 628))]


def test_texts_that_end_are_padded_with_zeros(decode, files):
    first = decode()[0][0]
    texts = decode("--eos_token_id", first, "--length_penalty", 0)
    settings = BeamSettings(3, 6, 0, 4, 1.0, 0, (50256, first))
    assert texts == expected(files, "base.pt", CONTEXTS, settings)
    assert texts[0] == [first, 0, 0, 0, 0, 0]


def test_a_prediction_records_its_texts_length(decode, files, tmp_path):
    """The length tells text from padding, whatever the end token is."""
    first = decode()[0][0]
    lengths = {}
    for name, flags in (("open", []), ("ended", ["--eos_token_id", first, "--length_penalty", 0])):
        decode(*flags)
        lines = (tmp_path / "out.jsonl").read_text().splitlines()
        lengths[name] = [json.loads(line)["length"] for line in lines]
    assert set(lengths["open"]) == {6}
    assert lengths["ended"][0] == 1


@pytest.mark.parametrize(("min_length", "warned"), [("6", True), ("5", False)])
def test_a_min_length_that_lets_no_text_end_is_warned_of(caplog, min_length, warned):
    flags = ["--eval_len", "6", "--min_length", min_length]
    gpt2_beam.settings_of(gpt2_beam.parse_args(flags))
    assert ("--min_length is --eval_len, 6: no text can end before it" in caplog.text) == warned


@pytest.mark.slow
def test_base_and_lora_in_two_files_decode_like_one_file(decode, files):
    plain = decode()
    texts = decode("--lora_path", files / "lora.pt")
    assert texts != plain
    settings = BeamSettings(3, 6, 1.0, 4, 1.0, 0, (50256,))
    assert texts == expected(files, "whole.pt", CONTEXTS, settings)
    whole = ["--init_checkpoint", files / "whole.pt"]
    assert decode(*whole) == decode(*whole, "--lora_dim", 4, "--lora_alpha", 32) == texts
    assert decode("--lora_path", files / "old.pt", "--lora_alpha", 32) == texts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "initialization", "formats"),
    [("lora", "default", ("safetensors", "peft")), ("rslora+dora", "olora", ("safetensors",))],
)
def test_lora_on_every_projection(decode, files, tmp_path, variant, initialization, formats):
    """Base and LoRA in two files, in any format, give the texts of both in one file."""
    args = argparse.Namespace(
        model_card="gpt2.xs",
        init_checkpoint=str(files / "base.pt"),
        lora_dim=4,
        lora_alpha=32,
        lora_targets=list(TARGETS),
        lora_variant=variant,
        lora_init=initialization,
    )
    model, base = open_model(args)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    save_model(tmp_path / "lora.pt", model, base, lora_only=True)
    save_model(tmp_path / "whole.pt", model, base, lora_only=False)
    settings = BeamSettings(3, 6, 1.0, 4, 1.0, 0, (50256,))
    texts = expected(tmp_path, "whole.pt", CONTEXTS, settings)
    assert texts != decode()
    assert decode("--init_checkpoint", tmp_path / "whole.pt") == texts
    adapter = read_adapter(tmp_path / "lora.pt")
    write_adapter(tmp_path / "safetensors", adapter, "lora")
    if "peft" in formats:
        write_adapter(tmp_path / "peft", adapter, "peft")
    for name in ("lora.pt", *formats):
        assert decode("--lora_path", tmp_path / name) == texts


def test_adapters_of_all_formats(decode, files, tmp_path):
    adapter = read_adapter(files / "lora.pt")
    texts = decode("--lora_path", files / "lora.pt")
    write_adapter(tmp_path / "lora.safetensors", adapter)
    write_adapter(tmp_path / "peft", adapter, "peft")
    for name in ("lora.safetensors", "peft"):
        assert decode("--lora_path", tmp_path / name) == texts
    assert decode("--lora_path", tmp_path / "peft", "--lora_dim", 4, "--lora_alpha", 32) == texts


def test_an_adapter_that_the_model_has_no_layers_for_is_merged(decode, files, tmp_path):
    """PEFT's usual adapter has one A for all of c_attn. This one also adapts c_proj."""
    widths = {"c_attn": 3 * 128, "c_proj": 128}
    modules = [f"transformer.h.{block}.attn.{name}" for block in range(4) for name in widths]
    tensors = {}
    for module in modules:
        tensors[f"{module}.lora_A"] = torch.randn(4, 128)
        tensors[f"{module}.lora_B"] = 0.3 * torch.randn(widths[module.rpartition(".")[2]], 4)
    dense = Adapter(tensors, LoraMetadata(rank=4, alpha=4, targets=("attn.c_proj", "c_attn")))
    write_adapter(tmp_path / "peft", dense, "peft")
    texts = decode("--lora_path", tmp_path / "peft")

    base = canonical_names(read_tensors(files / "base.pt")[0], "base")
    for module in modules:
        update = tensors[f"{module}.lora_B"] @ tensors[f"{module}.lora_A"]
        base[f"{module}.weight"] = base[f"{module}.weight"] + update.t()
    torch.save(base, tmp_path / "merged.pt")
    assert texts == decode("--init_checkpoint", tmp_path / "merged.pt") != decode()


def test_lora_is_merged_before_decoding(files, tmp_path):
    args = gpt2_beam.parse_args(
        flags(files, tmp_path, files / "data.jsonl", "--lora_path", files / "lora.pt", "--bf16")
    )
    run = gpt2_beam.DistEnv(0, 1, 0, torch.device("cpu"))
    model = gpt2_beam.model_to_decode(args, run)
    assert not any("lora_" in name for name in model.state_dict())
    assert {tensor.dtype for tensor in model.parameters()} == {torch.bfloat16}
    assert not model.training


@pytest.mark.parametrize("asked", [True, False])
def test_settings_of_the_device(decode, device_settings, asked):
    device_settings.write(not asked, not asked, True, False)
    decode(*(["--tf32"] if asked else []))
    device_settings.expect(tf32=asked)


def test_half_precision(decode):
    texts = decode("--bf16")
    assert [len(text) for text in texts] == [6] * len(CONTEXTS)
    assert texts[0] == texts[2]


def test_long_contexts_keep_their_last_tokens(decode, files, tmp_path, caplog):
    path = tmp_path / "long.jsonl"
    contexts = [[1, 2, 3, 4, 5], [9, 3, 4, 5], [3, 4, 5], [8]]
    write_contexts(path, contexts)
    with caplog.at_level(logging.WARNING):
        assert gpt2_beam.cut_contexts(contexts, 5, "fits") == contexts
        texts = decode("--seq_len", 9, data=path)
    settings = BeamSettings(3, 6, 1.0, 4, 1.0, 0, (50256,))
    assert texts == expected(files, "base.pt", [[3, 4, 5]] * 3 + [[8]], settings)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "2 of 4 contexts are longer than --seq_len - --eval_len = 3 tokens" in warning


def test_an_absolute_output_file_is_not_put_into_work_dir(files, tmp_path, one_process):
    path = tmp_path / "elsewhere" / "texts.jsonl"
    more = ["--output_file", path, "--work_dir", tmp_path / "work"]
    gpt2_beam.main(flags(files, tmp_path, files / "data.jsonl", *more))
    assert len(read(path)) == len(CONTEXTS)
    assert not (tmp_path / "work").exists()


def test_a_prediction_records_its_contexts_digest(decode, files, tmp_path):
    """The digest is of the full context, although the search uses only the end of a long one.

    End-of-text tokens, which --add_bos appends, are ignored.
    """
    contexts = [*CONTEXTS, [*range(1, 20)], [*CONTEXTS[0], 50256]]
    write_contexts(tmp_path / "data.jsonl", contexts)
    decode(data=tmp_path / "data.jsonl")
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    digests = [json.loads(line)["context_digest"] for line in lines]
    assert digests == [context_digest(context) for context in contexts]
    assert digests[-1] == digests[0]
    assert len({*digests}) == len({*map(tuple, contexts)}) - 1


def test_an_output_that_cannot_be_written_is_an_error_before_the_search(
    files, tmp_path, one_process, monkeypatch
):
    monkeypatch.setattr(gpt2_beam, "model_to_decode", None)  # is not reached
    path = tmp_path / "data.jsonl"
    path.write_bytes((files / "data.jsonl").read_bytes())
    argv = flags(files, tmp_path, path, "--output_file")
    with pytest.raises(ValueError, match=r"data\.jsonl: is an input as well"):
        gpt2_beam.main([*argv, str(path)])
    with pytest.raises(IsADirectoryError, match=f"--output_file {tmp_path} is a folder"):
        gpt2_beam.main([*argv, str(tmp_path)])
    monkeypatch.setattr(os, "access", lambda _, mode: not mode & os.W_OK)
    with pytest.raises(PermissionError, match=f"{tmp_path}: no permission to write there"):
        gpt2_beam.main([*argv, "out.jsonl"])
    assert path.read_bytes() == (files / "data.jsonl").read_bytes()


BAD_LINES = [
    ('{"context": [1, 2', r"data.jsonl:2: not JSON"),
    ("[1, 2]", r"data.jsonl:2: not a JSON object"),
    ('{"completion": [1]}', r'data.jsonl:2: has no "context"'),
    ('{"context": "text"}', r'data.jsonl:2: "context" has to be a list of token ids'),
    (
        '{"context": [1, true]}',
        r'data.jsonl:2: "context" has to be a list of token ids',
    ),
    ('{"context": []}', r"data.jsonl:2: the context is empty"),
    ('{"context": [1, 50257]}', r"data.jsonl:2: has token 50257, outside the vocabulary"),
    ('{"context": [-1, 4]}', r"data.jsonl:2: has token -1, outside the vocabulary"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_bad_lines(decode, tmp_path, line, message):
    path = tmp_path / "data.jsonl"
    path.write_text(f'{{"context": [0]}}\n{line}\n{{"context": [1]}}\n')
    with pytest.raises(ValueError, match=message):
        decode(data=path)
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--seq_len", 6], "--seq_len 6 leaves no token for a context next to --eval_len 6"),
        (["--seq_len", 1025], "--seq_len 1025: the model has 1024 positions"),
        (["--min_length", 7], "--min_length 7 is more than --eval_len 6, the most tokens that a"),
        (["--batch_size", 0], "--batch_size must be at least 1"),
        (["--beam", 0], "--beam must be at least 1, not 0"),
        (["--repetition_penalty", 0], "--repetition_penalty must be above 0"),
        (["--lora_alpha", 0], "--lora_alpha must be above 0, not 0"),
        (["--eos_token_id", 50257], "end token is 50257, outside the vocabulary of 50257"),
        (["--lora_dim", 4], "--lora_dim 4, but .*base.pt holds a base without LoRA.*--lora_path"),
        (["--data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--init_checkpoint", "nowhere.pt"], "nowhere.pt: no such checkpoint"),
        (["--model_card", "gpt2.sm"], "holds a gpt2.xs; give --model_card gpt2.xs"),
    ],
)
def test_flags_that_do_not_fit(decode, tmp_path, more, message):
    with pytest.raises((ValueError, OSError), match=message):
        decode(*more)
    assert not (tmp_path / "out.jsonl").exists()


def test_half_precision_without_a_gpu(decode):
    with pytest.raises(ValueError, match="fp16 needs a GPU: use bf16"):
        decode("--fp16")


@pytest.mark.parametrize(
    ("base", "more", "message"),
    [
        (None, [], "no model given: use --init_checkpoint"),
        (None, ["lora.pt"], "lora.pt: needs the base.*--init_checkpoint"),
        ("lora.pt", [], "lora.pt: holds LoRA weights only.* give the base as --init_checkpoint"),
        ("base.pt", ["whole.pt"], "whole.pt: holds a full model, not LoRA alone"),
        ("whole.pt", ["lora.pt"], "whole.pt: already holds LoRA weights"),
        ("base.pt", ["lora.pt", "--lora_dim", "8"], "trained with rank 4, but --lora_dim is 8"),
        ("base.pt", ["lora.pt", "--lora_alpha", "8"], "alpha 32, but lora_alpha is 8"),
        ("base.pt", ["old.pt"], "does not record the alpha.*as lora_alpha"),
        ("base.pt", ["base.pt"], "none of its .* tensors is LoRA's"),
    ],
)
def test_base_and_lora_that_do_not_fit(files, tmp_path, one_process, base, more, message):
    given = ["--platform", "local", "--model_card", "gpt2.xs", "--data", files / "data.jsonl"]
    given += ["--seq_len", 20, "--eval_len", 6, "--work_dir", tmp_path]
    given += ["--init_checkpoint", files / base] if base else []
    given += ["--lora_path", files / more[0], *more[1:]] if more else []
    with pytest.raises((CheckpointError, ValueError), match=message):
        gpt2_beam.main([str(word) for word in given])
    assert list(tmp_path.iterdir()) == []


def test_processes_compare_flags_before_anything_is_read(monkeypatch, one_process):
    def compare(args, dist_env):
        raise LookupError(args.lora_alpha)

    monkeypatch.setattr(gpt2_beam, "check_same_flags", compare)
    with pytest.raises(LookupError, match="7"):
        gpt2_beam.main(["--init_checkpoint", "nowhere", "--lora_alpha", "7"])


# Runs the script with each list of arguments and, in process 1, with some of its own.
IN_TWO_PROCESSES = """
import json, os, sys
sys.path.insert(0, {folder!r})
import gpt2_beam
from loralib.errors import TrainingError

for argv, own in json.loads({calls!r}):
    try:
        gpt2_beam.main([*argv, *(own if os.environ["RANK"] == "1" else ())])
    except TrainingError as error:
        print(error, file=sys.stderr)
"""


@pytest.mark.distributed
def test_two_processes_write_what_one_process_writes(decode, files, tmp_path, launch):
    """If one of them reads other contexts or weights, that is an error."""
    alone = decode("--lora_path", files / "lora.pt", "--batch_size", 1)
    more = ["--lora_path", files / "lora.pt", "--batch_size", 1, "--output_file", "two.jsonl"]
    more += ["--lora_alpha", 32]
    command = flags(files, tmp_path, files / "data.jsonl", *more)
    write_contexts(tmp_path / "other.jsonl", [*CONTEXTS[1:], [8]])
    tensors, _ = read_tensors(files / "lora.pt")
    torch.save({name: tensor + 1 for name, tensor in tensors.items()}, tmp_path / "other.pt")
    calls = [
        (command, ["--data", str(tmp_path / "other.jsonl")]),
        (command, ["--lora_path", str(tmp_path / "other.pt")]),
        (command, []),
    ]
    script = tmp_path / "calls.py"
    script.write_text(IN_TWO_PROCESSES.format(folder=str(SCRIPT.parent), calls=json.dumps(calls)))
    result = launch("torch.distributed.run", script, forks=True)
    assert result.returncode == 0, result.stderr
    assert " has contexts of --data " in result.stderr
    assert " has weights of transformer.h.0.attn.c_attn.lora_A " in result.stderr
    assert read(tmp_path / "two.jsonl") == alone
    assert "7 contexts, 4 of them distinct" in result.stderr


def test_an_error_is_one_line(files, tmp_path, monkeypatch, capsys, one_process):
    command = flags(files, tmp_path, files / "data.jsonl", "--init_checkpoint", files / "lora.pt")
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *command])
    with pytest.raises(SystemExit) as ended:
        gpt2_beam.run(gpt2_beam.main)
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gpt2_beam.py: error: ")
    assert "--lora_path" in line


@pytest.mark.parametrize(
    ("flags", "rows"),
    [
        pytest.param(("--batch_size", 2), 6, id="a batch"),
        pytest.param(("--batch_size", 5000), 12, id="more than there are contexts"),
        pytest.param(("--beam", 1000), products.MANY_ROWS, id="many beams"),
        pytest.param(("--beam", 60000), products.MANY_ROWS, id="too many beams"),
    ],
)
def test_products_are_measured_with_no_more_rows_than_needed(decode, monkeypatch, flags, rows):
    def record(weights, dtype, world_size, rows, backward):
        measured.append(rows)

    measured: list[int] = []
    monkeypatch.setattr(gpt2_beam, "choose_products", record)
    monkeypatch.setattr(gpt2_beam, "search", lambda model, batch, settings: [[1]] * len(batch))
    decode(*flags)
    assert measured == [rows]


@pytest.mark.parametrize("method", ["onednn", "packed"])
def test_the_linear_method_changes_no_text(decode, tmp_path, monkeypatch, method):
    if not processor.has_onednn(torch.float32):
        pytest.skip("PyTorch is built without oneDNN here")
    usual = decode()
    compute, used = METHODS[method], set()
    monkeypatch.setattr(products, "_chosen", {})
    monkeypatch.setattr(product_choices, "_chosen_before", {})
    monkeypatch.setattr(products, "_LARGE_OF_FEW", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(products, "_fastest", lambda *_: method)
    monkeypatch.setitem(METHODS, method, lambda *given: used.add(given[1].shape) or compute(*given))
    assert decode() == usual
    assert used == {(3 * 128, 128), (128, 128), (4 * 128, 128), (128, 4 * 128), (50257, 128)}
