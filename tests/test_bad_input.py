"""Every entry point on input that is wrong: one line that says what it is, and nothing else.

Each row of a table is an input: the command line, and what its one line says. In `CALLS` a script
runs in this process, as `python script.py` runs it, its last lines included; in `PROCESSES` and
`SHELLS` as a process of its own. {bad} is a folder of files that are wrong in one way each, {good}
one of sound files; messages leave these two out.
"""

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# ------------------------------------------------------------------------------------------------
# Sound files
# ------------------------------------------------------------------------------------------------

SENTENCES = ["the dog runs", "a cat sings a song", "this river is cold", "some letters are not"]


def write_lines(path: Path, rows: list) -> Path:
    """JSON lines."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def make_roberta(folder: Path) -> None:
    """A base of one layer, with a tokenizer."""
    from tokenizers import ByteLevelBPETokenizer

    from transformers import RobertaConfig, RobertaModel, RobertaTokenizerFast

    folder.mkdir()
    bpe = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    bpe.train_from_iterator(SENTENCES, 300, special_tokens=special, show_progress=False)
    tokenizer = RobertaTokenizerFast(*bpe.save_model(str(folder)))
    tokenizer.save_pretrained(folder)
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes = {"intermediate_size": 8, "max_position_embeddings": 34, "type_vocab_size": 1}
    RobertaModel(RobertaConfig(vocab_size=len(tokenizer), **shape, **sizes)).save_pretrained(folder)


def make_adapter(path: Path, modules: dict[str, tuple[int, int]]) -> None:
    """A LoRA file of rank 2, with the head of two classes where the base is RoBERTa."""
    import torch

    from loralib.adapters.adapter import Adapter, lora_metadata
    from loralib.adapters.formats import write_adapter

    tensors = {}
    for module, (out, width) in modules.items():
        tensors |= {
            f"{module}.lora_A": torch.ones(2, width),
            f"{module}.lora_B": torch.ones(out, 2),
        }
    head = {"dense.weight": (8, 8), "dense.bias": (8,), "out_proj.weight": (2, 8)}
    for name, shape in {**head, "out_proj.bias": (2,)}.items():
        tensors[f"classifier.{name}"] = torch.ones(shape)
    write_adapter(path, Adapter(tensors, lora_metadata(tensors, 2, 4)))


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A folder of sound files."""
    folder = tmp_path_factory.mktemp("good")
    make_roberta(folder / "base")
    layer = "roberta.encoder.layer.0.attention.self"
    make_adapter(folder / "lora.safetensors", {f"{layer}.query": (8, 8), f"{layer}.value": (8, 8)})
    rte = folder / "glue" / "RTE"
    rte.mkdir(parents=True)
    header = "index\tsentence1\tsentence2\tlabel\n"
    rows = "".join(f"{n}\t{SENTENCES[n]}\t{SENTENCES[0]}\tentailment\n" for n in range(4))
    for name in ("train", "dev"):
        (rte / f"{name}.tsv").write_text(header + rows)
    (folder / "corpus.txt").write_text("\n".join(SENTENCES))
    write_lines(folder / "texts.jsonl", [{"text": text} for text in SENTENCES])
    write_lines(
        folder / "train.json", [{"text": t, "label": n % 2} for n, t in enumerate(SENTENCES)]
    )
    rows = [{"context": text, "completion": text} for text in SENTENCES]
    write_lines(folder / "formatted.jsonl", rows)
    write_lines(folder / "encoded.jsonl", [{"context": [1, 2], "completion": [3, 4]}] * 4)
    write_lines(folder / "predicted.jsonl", [{"id": n, "predict": [1]} for n in range(4)])
    for name in ("references", "predictions"):
        (folder / name).write_text("a text\n")
    return folder


# ------------------------------------------------------------------------------------------------
# Files that are wrong in one way each
# ------------------------------------------------------------------------------------------------

# Settings of RoBERTa's config.json, by the name of the base that has it -> its value there.
CONFIGS = {
    "string_heads": {"num_attention_heads": "2"},
    "zero_heads": {"num_attention_heads": 0},
    "odd_heads": {"num_attention_heads": 3},
    "float_width": {"hidden_size": 8.0},
    "null_vocabulary": {"vocab_size": None},
    "negative_layers": {"num_hidden_layers": -1},
    "true_types": {"type_vocab_size": True},
    "list_activation": {"hidden_act": ["gelu"]},
    "unknown_activation": {"hidden_act": "gelo"},
    "dropout_of_two": {"hidden_dropout_prob": 2},
    "string_epsilon": {"layer_norm_eps": "1e-5"},
    "null_padding": {"pad_token_id": None},
    "padding_beyond": {"pad_token_id": 9999},
    "no_positions": {"max_position_embeddings": 2},
    "list_labels": {"id2label": ["no", "yes"]},
    "labels_with_gap": {"id2label": {"0": "no", "2": "yes"}},
    "list_label_ids": {"label2id": ["no", "yes"]},
    "list_type": {"model_type": ["roberta"]},
    "method": {"save_pretrained": True},
    "string_rank": {"apply_lora": True, "lora_r": "4", "lora_alpha": 8},
}
GPT2 = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 40}
GPT2_CONFIGS = {
    "gpt2_string": {"n_head": "2"},
    "gpt2_zero": {"n_head": 0},
    "gpt2_null": {"n_layer": None},
    "gpt2_epsilon": {"layer_norm_epsilon": [1e-5]},
}
# Text files, by name; those in UTF-16 are made of sound ones.
TEXTS = {
    "repeated.csv": "text,label,label\na,1,0\nb,0,1\n",
    "shifted.csv": "text,label\nx,a dog,1\ny,a cat,0\n",
    "ids.csv": "id,n,label\nx,1,0\ny,2,1\n",
    "three.csv": "a,b,c,label\nx,y,z,0\nz,y,x,1\n",
    "class.csv": "text,label\na,1\nb,1\n",
    "blank.csv": "text,label\na,1\nb,\n",
    "object.json": '{"text": {"a": "b"}, "label": 1}\n{"text": {"a": "c"}, "label": 0}\n',
    "list.json": '{"text": "a", "label": 1}\n{"text": ["a"], "label": 0}\n',
    "empty": "",
    "blank_lines": "\n\n",
    "broken.jsonl": '{"text": \n',
    "no_text.jsonl": '{"texts": "a"}\n',
    "object.jsonl": '{"text": {"a": 1}}\n',
    "gap.jsonl": '{"text": "a"}\n\n{"text": "b"}\n',
    "answered.jsonl": '{"text": "a", "truncated": false}\n',
    "stranger.jsonl": '{"text": "a", "adapter": "x"}\n',
    "list.jsonl": "[1]\n",
    "context.jsonl": '{"completion": "a"}\n',
    "empty_completion.jsonl": '{"context": "a", "completion": " "}\n',
    "string_ids.jsonl": '{"context": ["1"], "completion": [2]}\n',
    "large_ids.jsonl": '{"context": [1], "completion": [99999]}\n',
    "no_ids.jsonl": '{"context": [], "completion": [1]}\n',
    "one_prediction.jsonl": '{"id": 0, "predict": [1]}\n',
    "twice.jsonl": '{"id": 0, "predict": [1]}\n' * 2,
    "line.txt": "name : Blue Spice, coffee\n",
    "object.txt": '{"entries": {}}',
    "entry.txt": '{"entries": [{"1": {}}]}',
    "triple.txt": '[{"tripleset": [["a", "b"]], "annotations": []}]',
    "three_lines": "a\nb\nc\n",
    "damaged.pt": "not a checkpoint",
    "rte.tsv": "index\tsentence1\n0\ta\n",
}


@pytest.fixture(scope="module")
def bad(good, tmp_path_factory) -> Path:
    """A folder of files that are not sound."""
    folder = tmp_path_factory.mktemp("bad")
    for name, content in TEXTS.items():
        (folder / name).write_text(content)
    for name in ("train.json", "corpus.txt", "texts.jsonl", "formatted.jsonl", "encoded.jsonl"):
        text = (good / name).read_text()
        (folder / f"utf16_{name}").write_text(text, encoding="utf-16")
    (folder / "latin").write_bytes("caf\xe9\n".encode("latin1"))
    for name, settings in CONFIGS.items():
        shutil.copytree(good / "base", folder / name)
        values = json.loads((folder / name / "config.json").read_text())
        (folder / name / "config.json").write_text(json.dumps({**values, **settings}))
    for name, settings in GPT2_CONFIGS.items():
        (folder / name).mkdir()
        values = {**GPT2, "n_positions": 30, **settings}
        (folder / name / "config.json").write_text(json.dumps(values))
        (folder / name / "model.safetensors").write_text("not read before the settings are")
    make_gpt2(folder)
    (folder / "RTE").mkdir()
    shutil.copy(folder / "rte.tsv", folder / "RTE" / "train.tsv")
    return folder


def make_gpt2(folder: Path) -> None:
    """An adapter of GPT-2's, and weights that hold no LoRA."""
    import torch
    from safetensors.torch import save_file

    A, B = torch.ones(4, 8), torch.ones(16, 2)
    tensors = {"transformer.h.0.attn.c_attn.lora_A": A, "transformer.h.0.attn.c_attn.lora_B": B}
    torch.save(tensors, folder / "gpt2_lora.pt")
    save_file({"wte.weight": torch.ones(40, 8)}, folder / "plain.safetensors")
    for name in GPT2_CONFIGS:
        save_file({"wte.weight": torch.ones(40, 8)}, folder / name / "model.safetensors")


# ------------------------------------------------------------------------------------------------
# Tables
# ------------------------------------------------------------------------------------------------

GLUE = "examples/text-classification/run_glue.py"
MLM = "examples/language-modeling/run_mlm.py"
PREDICT = "examples/text-classification/predict.py"
CONVERT = "utils/convert.py"
SPLIT = "utils/split_lora.py"
REPRODUCE = "utils/reproduce.py"
FT = "NLG/src/gpt2_ft.py"
BEAM = "NLG/src/gpt2_beam.py"
ENCODE = "NLG/src/gpt2_encode.py"
DECODE = "NLG/src/gpt2_decode.py"
SCORES = "NLG/eval/measure_scores.py"
LOOP = "examples/plain_pytorch_loop.py"
SMALL_DATA = "examples/make_small_data.py"
SMALL_E2E = "examples/make_small_e2e.py"
# How each is called, before what is wrong.
COMMON = {
    GLUE: "--model_name_or_path {good}/base --output_dir out --do_train",
    MLM: "--output_dir out --do_train",
    PREDICT: "--model_name_or_path {good}/base a={good}/lora.safetensors --output_file out.jsonl",
    FT: "--platform local --model_card gpt2.xs --work_dir out --lora_dim 2 --seq_len 8 "
    "--valid_data {good}/encoded.jsonl",
    BEAM: "--platform local --model_card gpt2.xs --work_dir out",
    ENCODE: "--output out.jsonl",
    DECODE: "--output_ref_file out_ref --output_pred_file out_pred --vocab {good}/base",
}
RTE = "--task_name rte --data_dir {good}/glue"
OWN = "--apply_lora --lora_r 2 --lora_alpha 4 --train_file {bad}/"
CALLS = {
    GLUE: [
        (
            "{rte} --model_name_or_path {bad}/string_heads",
            'string_heads/config.json: num_attention_heads must be a positive integer, not "2"',
        ),
        (
            "{rte} --model_name_or_path {bad}/zero_heads",
            "zero_heads/config.json: num_attention_heads must be a positive integer, not 0",
        ),
        (
            "{rte} --model_name_or_path {bad}/odd_heads",
            "odd_heads/config.json: hidden_size 8 is not a multiple of 3 heads",
        ),
        (
            "{rte} --model_name_or_path {bad}/float_width",
            "float_width/config.json: hidden_size must be a positive integer, not 8.0",
        ),
        (
            "{rte} --model_name_or_path {bad}/null_vocabulary",
            "null_vocabulary/config.json: vocab_size must be a positive integer, not null",
        ),
        (
            "{rte} --model_name_or_path {bad}/negative_layers",
            "negative_layers/config.json: num_hidden_layers must be a positive integer, not -1",
        ),
        (
            "{rte} --model_name_or_path {bad}/true_types",
            "true_types/config.json: type_vocab_size must be a positive integer, not true",
        ),
        (
            "{rte} --model_name_or_path {bad}/list_activation",
            'list_activation/config.json: hidden_act must be a string, not ["gelu"]',
        ),
        (
            "{rte} --model_name_or_path {bad}/unknown_activation",
            "unknown_activation/config.json: unknown hidden_act 'gelo' (known: gelu, "
            "gelu_new, gelu_fast, relu, silu, swish, tanh)",
        ),
        (
            "{rte} --model_name_or_path {bad}/dropout_of_two",
            "dropout_of_two/config.json: hidden_dropout_prob must lie in [0, 1], not 2",
        ),
        (
            "{rte} --model_name_or_path {bad}/string_epsilon",
            'string_epsilon/config.json: layer_norm_eps must be a number from 0 on, not "1e-5"',
        ),
        (
            "{rte} --model_name_or_path {bad}/null_padding",
            "null_padding/config.json: pad_token_id must be an integer from 0 on, not null",
        ),
        (
            "{rte} --model_name_or_path {bad}/padding_beyond",
            "padding_beyond/config.json: pad_token_id 9999 is beyond the 269 of vocab_size",
        ),
        (
            "{rte} --model_name_or_path {bad}/no_positions",
            "no_positions/config.json: max_position_embeddings 2 has no position for a "
            "token: the first 2, up to pad_token_id, are none of a token's",
        ),
        (
            "{rte} --model_name_or_path {bad}/list_labels",
            "list_labels/config.json: id2label must be a map of strings or integers by integer or "
            'null, not ["no", "yes"]',
        ),
        (
            "{rte} --model_name_or_path {bad}/labels_with_gap",
            "labels_with_gap/config.json: id2label must number its classes 0, 1, …; it has 0, 2",
        ),
        (
            "{rte} --model_name_or_path {bad}/list_label_ids",
            "list_label_ids/config.json: label2id must be a map of integers by string or "
            'null, not ["no", "yes"]',
        ),
        (
            "{rte} --model_name_or_path {bad}/list_type",
            "list_type/config.json: model_type must be a string, not ['roberta']",
        ),
        (
            "{rte} --model_name_or_path {bad}/method",
            "method/config.json: there is no setting 'save_pretrained': it is the name of a method",
        ),
        (
            "{rte} --model_name_or_path {bad}/string_rank",
            'string_rank/config.json: lora_r must be a positive integer or null, not "4"',
        ),
        (
            "{own}repeated.csv",
            "repeated.csv: has the column 'label' 2 times; give each column a name of its own",
        ),
        (
            "{own}shifted.csv",
            "shifted.csv: row 1: has 3 fields, the header names 2 columns",
        ),
        (
            "{own}ids.csv",
            "ids.csv: has 0 text columns (id is named as an identifier, n is of int64)",
        ),
        (
            "{own}three.csv",
            "three.csv: has 3 text columns (a, b, c)",
        ),
        (
            "{own}class.csv",
            "class.csv: all 2 rows have the label '1'; training needs at least two labels",
        ),
        (
            "{own}blank.csv",
            "blank.csv: row 2: has no label",
        ),
        (
            "{own}object.json",
            "object.json: has 0 text columns (text is an object in each row)",
        ),
        (
            "{own}list.json",
            'list.json: row 2: its text is a list, not a text (["a"])',
        ),
        (
            "{own}utf16_train.json",
            "utf16_train.json: is UTF-16 text; save it as UTF-8",
        ),
        (
            "{own}three.csv --text_columns d",
            "three.csv: has no column 'd', but a, b, c, label; --text_columns says another",
        ),
        (
            "{own}three.csv --text_columns a --label_column gold",
            "three.csv: has no column 'gold', but a, b, c, label; --label_column says another",
        ),
        (
            "--task_name rte --data_dir {bad}",
            "RTE/train.tsv:1: no column sentence2, label in the header (index, sentence1)",
        ),
        (
            "{rte} --max_seq_length 7",
            "--max_seq_length 7: a pair of texts needs at least 8 tokens, of which 4 are "
            "special ones",
        ),
        (
            "{rte} --max_seq_length 33",
            "--max_seq_length 33: the model has 32 positions",
        ),
        (
            "{rte} --text_columns a",
            "--text_columns is for files of your own, not for --task_name",
        ),
    ],
    MLM: [
        (
            "--train_file nowhere",
            "nowhere: no such file",
        ),
        (
            "--train_file {bad}/utf16_corpus.txt",
            "utf16_corpus.txt: is UTF-16 text; save it as UTF-8",
        ),
        (
            "--train_file {bad}/latin",
            "latin:1: not UTF-8 text (invalid continuation byte)",
        ),
        (
            "--train_file {bad}/empty",
            "empty: holds no text",
        ),
        (
            "--train_file {good}/corpus.txt --max_seq_length 3",
            "--max_seq_length 3: a text needs at least 4 tokens, of which 2 are special ones",
        ),
        (
            "--train_file {good}/corpus.txt --max_seq_length 33 --model_name_or_path {good}/base",
            "--max_seq_length 33: the model has 32 positions",
        ),
        (
            "--train_file {good}/corpus.txt --num_attention_heads 0",
            "num_attention_heads must be a positive integer, not 0",
        ),
        (
            "--train_file {good}/corpus.txt --mlm_probability 2",
            "mlm_probability is above 0 and at most 1, not 2.0",
        ),
        (
            "--train_file {good}/corpus.txt --vocab_size 0",
            "--vocab_size 0: bytes and special tokens are 261 already",
        ),
        (
            "--train_file {good}/corpus.txt --model_name_or_path {bad}/string_heads",
            'string_heads/config.json: num_attention_heads must be a positive integer, not "2"',
        ),
        (
            "--train_file {good}/corpus.txt --do_eval",
            "--do_eval needs --validation_file",
        ),
    ],
    PREDICT: [
        (
            "--input_file {bad}/broken.jsonl",
            "broken.jsonl: line 1: is not JSON (Expecting value)",
        ),
        (
            "--input_file {bad}/no_text.jsonl",
            "no_text.jsonl: line 1: has no text",
        ),
        (
            "--input_file {bad}/object.jsonl",
            'object.jsonl: line 1: its text is no string ({"a": 1})',
        ),
        (
            "--input_file {bad}/gap.jsonl",
            "gap.jsonl: line 2: is blank; only lines at the end may be",
        ),
        (
            "--input_file {bad}/answered.jsonl",
            "answered.jsonl: line 1: has the key 'truncated', which the answer needs: give "
            "it another name",
        ),
        (
            "--input_file {bad}/stranger.jsonl",
            'stranger.jsonl: line 1: unknown adapter "x" (expected a)',
        ),
        (
            "--input_file {bad}/list.jsonl",
            "list.jsonl: line 1: is no JSON object ([1])",
        ),
        (
            "--input_file {bad}/utf16_texts.jsonl",
            "utf16_texts.jsonl: is UTF-16 text; save it as UTF-8",
        ),
        (
            "--input_file {bad}/latin",
            "latin: line 1: is not JSON ('utf-8' codec can't decode byte 0xe9 in position "
            "3: unexpected end of data)",
        ),
        (
            "--input_file nowhere",
            "--input_file nowhere: no such file",
        ),
        (
            "--input_file {good}/texts.jsonl --max_seq_length 3",
            "--max_seq_length 3: a text needs at least 4 tokens, of which 2 are special ones",
        ),
        (
            "--input_file {good}/texts.jsonl --max_seq_length 33",
            "--max_seq_length 33: the model has 32 positions",
        ),
        (
            "--input_file {good}/texts.jsonl --model_name_or_path {bad}/zero_heads",
            "zero_heads/config.json: num_attention_heads must be a positive integer, not 0",
        ),
        (
            "--input_file {good}/texts.jsonl a={bad}/damaged.pt",
            "two adapters have the name 'a'",
        ),
    ],
    CONVERT: [
        (
            "nowhere.bin out.safetensors",
            "nowhere.bin: no such checkpoint file",
        ),
        (
            "{bad}/damaged.pt out.safetensors",
            "damaged.pt: damaged, or holds more than tensors",
        ),
        (
            "{bad}/gpt2_lora.pt out.safetensors",
            "gpt2_lora.pt: does not say with what alpha it was trained",
        ),
        (
            "{bad}/plain.safetensors out.safetensors --lora_alpha 4",
            "plain.safetensors: none of its 1 tensors is LoRA's ('lora_')",
        ),
        (
            "{good}/lora.safetensors {good}/lora.safetensors",
            "lora.safetensors: exists already; give another name",
        ),
        (
            "{good}/lora.safetensors out.txt",
            "out.txt: its name does not tell the format to write: .safetensors is lora, .bin "
            "and .pt are release",
        ),
        (
            "{good}/lora.safetensors out --to merged --base {bad}/string_heads",
            'string_heads/config.json: num_attention_heads must be a positive integer, not "2"',
        ),
        (
            "{bad}/gpt2_lora.pt out --to merged --lora_alpha 4 --base {bad}/gpt2_string",
            'gpt2_string/config.json: n_head must be a positive integer, not "2"',
        ),
        (
            "{bad}/gpt2_lora.pt out --to merged --lora_alpha 4 --base {bad}/gpt2_zero",
            "gpt2_zero/config.json: n_head must be a positive integer, not 0",
        ),
        (
            "{bad}/gpt2_lora.pt out --to merged --lora_alpha 4 --base {bad}/gpt2_null",
            "gpt2_null/config.json: n_layer must be a positive integer, not null",
        ),
        (
            "{bad}/gpt2_lora.pt out --to merged --lora_alpha 4 --base {bad}/gpt2_epsilon",
            "gpt2_epsilon/config.json: layer_norm_epsilon must be a number from 0 on, not [1e-05]",
        ),
    ],
    SPLIT: [
        (
            "nowhere out.bin",
            "nowhere: no such checkpoint file",
        ),
        (
            "{bad}/damaged.pt out.bin",
            "damaged.pt: damaged, or holds more than tensors",
        ),
        (
            "{bad}/plain.safetensors out.bin",
            "plain.safetensors: holds no LoRA weights",
        ),
        (
            "{bad}/gpt2_lora.pt out.safetensors",
            "gpt2_lora.pt: has no config.json next to it that states rank and alpha, which "
            "out.safetensors has to hold; write a .bin instead",
        ),
    ],
    REPRODUCE: [
        (
            "nothing",
            "there is no recipe or row 'nothing'",
        ),
        (
            "roberta_base_sst2 --small --seeds one",
            "argument --seeds: invalid int value: 'one'",
        ),
        (
            "roberta_base_sst2 --small -- --seed 1",
            "--seed behind --: this program gives each run its own",
        ),
        (
            "roberta_base_sst2 --small --output_dir {bad}/empty",
            "empty: File exists",
        ),
    ],
    FT: [
        (
            "--train_data nowhere",
            "nowhere: No such file or directory",
        ),
        (
            "--train_data {bad}/empty",
            "empty: is empty",
        ),
        (
            "--train_data {bad}/utf16_encoded.jsonl",
            "utf16_encoded.jsonl: is UTF-16 text; save it as UTF-8",
        ),
        (
            "--train_data {bad}/broken.jsonl",
            "broken.jsonl:1: not JSON (Expecting value: line 1 column 9 (char 8))",
        ),
        (
            "--train_data {bad}/string_ids.jsonl",
            'string_ids.jsonl:1: "context" has to be a list of token ids',
        ),
        (
            "--train_data {bad}/large_ids.jsonl",
            'large_ids.jsonl:1: "completion" has token 99999, outside the vocabulary of 50257',
        ),
        (
            "--train_data {good}/encoded.jsonl --init_checkpoint {bad}/damaged.pt",
            "damaged.pt: damaged, or holds more than tensors",
        ),
        (
            "--train_data {good}/encoded.jsonl --init_checkpoint nowhere",
            "nowhere: no such checkpoint file",
        ),
        (
            "--train_data {good}/encoded.jsonl --lora_dim -1",
            "--lora_dim has to be at least 0, and --lora_alpha above 0",
        ),
        (
            "--train_data {good}/encoded.jsonl --seq_len 0",
            "the sequence length has to be at least 1, but is 0",
        ),
        (
            "--train_data {good}/encoded.jsonl --lora_alpha 0",
            "--lora_dim has to be at least 0, and --lora_alpha above 0",
        ),
        (
            "--train_data {good}/encoded.jsonl --lora_dropout 2",
            "--lora_dropout has to be at most 1, but is 2.0",
        ),
    ],
    BEAM: [
        (
            "--data {good}/encoded.jsonl",
            "there is no model: give its base as --init_checkpoint",
        ),
        (
            "--data {good}/encoded.jsonl --init_checkpoint {bad}/damaged.pt",
            "damaged.pt: damaged, or holds more than tensors",
        ),
        (
            "--data {good}/encoded.jsonl --seq_len 8 --eval_len 8",
            "--seq_len 8 leaves no token for a context beside --eval_len 8",
        ),
        (
            "--data {good}/encoded.jsonl --beam 0",
            "--beam has to be at least 1, but is 0",
        ),
    ],
    ENCODE: [
        (
            "--input {bad}/context.jsonl --vocab {good}/base",
            'context.jsonl:1: "context" is missing or not a text',
        ),
        (
            "--input {bad}/empty_completion.jsonl --vocab {good}/base",
            "empty_completion.jsonl:1: the completion is empty",
        ),
        (
            "--input {bad}/utf16_formatted.jsonl --vocab {good}/base",
            "utf16_formatted.jsonl: is UTF-16 text; save it as UTF-8",
        ),
        (
            "--input {bad}/list.jsonl --vocab {good}/base",
            "list.jsonl:1: not a JSON object: [1]",
        ),
        (
            "--input nowhere --vocab {good}/base",
            "nowhere: No such file or directory",
        ),
        (
            "--input {good}/formatted.jsonl --vocab {good}/glue",
            "glue: holds no vocabulary (encoder.json with vocab.bpe, or vocab.json with "
            "merges.txt, or tokenizer.json)",
        ),
    ],
    DECODE: [
        (
            "--input_file {good}/formatted.jsonl --sample_file {bad}/one_prediction.jsonl",
            "one_prediction.jsonl: has no prediction of id 1 and 2 others",
        ),
        (
            "--input_file {good}/formatted.jsonl --sample_file {bad}/twice.jsonl",
            "twice.jsonl:2: another prediction of id 0",
        ),
        (
            "--input_file {good}/formatted.jsonl --sample_file {good}/texts.jsonl",
            'texts.jsonl:1: not a line {"id": number, "predict": [ids]}',
        ),
        (
            "--input_file {bad}/latin --sample_file {good}/predicted.jsonl",
            "latin:1: not UTF-8 (unexpected end of data at byte 3)",
        ),
        (
            "--input_file {good}/formatted.jsonl --sample_file {good}/predicted.jsonl "
            "--ref_unique_file {bad}/utf16_corpus.txt",
            "utf16_corpus.txt: is UTF-16 text; save it as UTF-8",
        ),
        (
            "--input_file {good}/formatted.jsonl --sample_file {good}/predicted.jsonl --ref_num 0",
            "--ref_num 0: must be 1 or more",
        ),
        (
            "--input_file {good}/formatted.jsonl --sample_file {good}/predicted.jsonl "
            "--filter seen",
            'formatted.jsonl:1: --filter seen needs "cate", true or false',
        ),
    ],
    "NLG/src/format_converting_e2e.py": [
        (
            "{bad}/line.txt out",
            "line.txt:1: not a line meaning representation||text: name : Blue Spice, coffee",
        ),
        (
            "{bad}/utf16_corpus.txt out",
            "utf16_corpus.txt: is UTF-16 text; save it as UTF-8",
        ),
        (
            "{bad}/empty out",
            "empty:1: not a line meaning representation||text:",
        ),
    ],
    "NLG/src/format_converting_webnlg.py": [
        (
            "{bad}/object.txt out",
            'object.txt: not WebNLG\'s format, it has no list of "entries"',
        ),
        (
            "{bad}/entry.txt out",
            "entry.txt: entry 1: not in WebNLG's format (KeyError('modifiedtripleset'))",
        ),
        (
            "{bad}/broken.jsonl out",
            "broken.jsonl: not JSON (Expecting value: line 2 column 1 (char 10))",
        ),
    ],
    "NLG/src/format_converting_dart.py": [
        (
            "{bad}/object.txt out",
            "object.txt: not DART's format, it is not a list",
        ),
        (
            "{bad}/triple.txt out",
            "triple.txt: entry 1: a triple does not have three parts",
        ),
        (
            "{bad}/utf16_train.json out",
            "utf16_train.json: is UTF-16 text; save it as UTF-8",
        ),
        (
            "{bad}/latin out",
            "latin: not JSON ('utf-8' codec can't decode byte 0xe9 in position 3: invalid "
            "continuation byte)",
        ),
    ],
    SCORES: [
        (
            "{good}/references",
            "give either REFERENCES PREDICTIONS, or -R PREFIX -H PREDICTIONS",
        ),
        (
            "{good}/references {bad}/three_lines",
            "three_lines: 3 predictions for 1 rows of references",
        ),
        (
            "{bad}/blank_lines {good}/predictions",
            "blank_lines: holds no references",
        ),
        (
            "{good}/references {bad}/latin",
            "latin: not text in UTF-8 (invalid continuation byte)",
        ),
        (
            "{bad}/utf16_corpus.txt {good}/predictions",
            "utf16_corpus.txt: is UTF-16 text; save it as UTF-8",
        ),
        (
            "{good}/references {good}/predictions -m meter",
            "no metric 'meter' for these arguments; known: bleu, nist, meteor, rouge_l, cider",
        ),
        (
            "-R {good}/ref -H {good}/predictions -nr 2",
            "no such file: ref0, ref1 (with -nr 2)",
        ),
        (
            "{good}/references nowhere",
            "nowhere: No such file or directory",
        ),
    ],
    "utils/download_glue_data.py": [
        ("--tasks nothing", "unknown task 'nothing' (known: CoLA, "),
        ("--base_url ftp://nowhere", "'ftp://nowhere' is not an http or https address"),
    ],
    LOOP: [
        (
            "--r 0",
            "--r must be at least 1, not 0",
        ),
        (
            "--epochs 0",
            "--epochs must be at least 1, not 0",
        ),
        (
            "--output_dir {bad}/empty",
            "empty: File exists",
        ),
        (
            "--r two",
            "argument --r: invalid int value: 'two'",
        ),
    ],
    SMALL_DATA: [
        (
            "--output_dir {bad}/empty",
            "empty/SST-2: Not a directory",
        ),
    ],
    SMALL_E2E: [
        (
            "--output_dir {bad}/empty",
            "empty: File exists",
        ),
        (
            "--output_dir out --seed x",
            "argument --seed: invalid int value: 'x'",
        ),
    ],
}
# A script with its arguments, and what the one line says.
PROCESSES = [
    (
        "utils/download_glue_data.py --tasks MRPC --path_to_mrpc nowhere --data_dir out",
        "ERROR: MRPC: nowhere/msr_paraphrase_train.txt: no such file (from --path_to_mrpc)",
    ),
    (
        "utils/download_glue_data.py --tasks SST-2 --data_dir {bad}/empty",
        "ERROR: SST: [Errno 17] File exists: ",
    ),
    (
        "NLU/recipe.py roberta_base_rte --small nowhere nowhere",
        "roberta_base_rte.sh: error: ./roberta_base_mnli_lora.bin: no such file; ",
    ),
    ("NLU/recipe.py nothing", "invalid choice: 'nothing'"),
    (
        "NLG/eval/GenerationEval/eval.py -R nowhere -H nowhere -nr 1",
        "eval.py: error: no such file: nowhere0 (with -nr 1)",
    ),
    (
        "NLG/eval/e2e/measure_scores.py {good}/references {bad}/three_lines",
        "measure_scores.py: error: {bad}/three_lines: 3 predictions for 1 rows of references",
    ),
    (
        "NLG/src/gpt2_encode.py --input {bad}/list.jsonl --vocab {good}/base --output out",
        "gpt2_encode.py: error: {bad}/list.jsonl:1: not a JSON object: [1]",
    ),
    (
        "examples/make_small_data.py --output_dir {bad}/empty",
        "make_small_data.py: error: {bad}/empty/SST-2: Not a directory",
    ),
    (
        "examples/text-classification/run_glue.py --model_name_or_path {bad}/zero_heads "
        "--task_name rte --data_dir {good}/glue --do_train --output_dir out",
        "zero_heads/config.json: num_attention_heads must be a positive integer, not 0",
    ),
]
# The same of a shell script, with what is in its environment.
SHELLS = [
    ("NLU/roberta_base_rte.sh", {"NPROC": "none"}, "NPROC=none: has to be a number of processes"),
    ("NLG/e2e_gpt2_md.sh", {}, "gpt2-medium-pytorch_model.bin is not there; make it by: "),
]


# ------------------------------------------------------------------------------------------------
# Tests
# ------------------------------------------------------------------------------------------------


def lines_of(text: str) -> list[str]:
    """What is said, without the usage that argparse puts before its errors."""
    assert "Traceback" not in text
    return [line for line in text.splitlines() if "error" in line.lower()]


@pytest.fixture
def call(monkeypatch, tmp_path, capsys):
    """Runs a script as `python script.py` does; what it writes to stderr, and its exit status."""

    def run(script: str, arguments: list[str]) -> tuple[str, int]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(str((ROOT / script).parent))
        monkeypatch.setattr(sys, "argv", [str(ROOT / script), *arguments])
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        handler = signal.getsignal(signal.SIGTERM)
        capsys.readouterr()
        try:
            with pytest.raises(SystemExit) as ended:
                runpy.run_path(str(ROOT / script), run_name="__main__")
        finally:
            signal.signal(signal.SIGTERM, handler)
        if isinstance(ended.value.code, str):  # Python writes it to stderr, and ends with 1
            return capsys.readouterr().err + ended.value.code, 1
        return capsys.readouterr().err, ended.value.code

    return run


ROWS = [(script, *row) for script, rows in CALLS.items() for row in rows]


@pytest.mark.parametrize(("script", "arguments", "message"), ROWS)
def test_one_line_says_what_is_wrong(call, good, bad, tmp_path, script, arguments, message):
    given = f"{COMMON.get(script, '')} {arguments}".replace("{rte}", RTE).replace("{own}", OWN)
    given = given.format(good=good, bad=bad)
    before = sorted([*good.rglob("*"), *bad.rglob("*")])
    said, status = call(script, given.split())
    assert status in (1, 2)
    (line,) = lines_of(said)
    assert line.startswith(f"{Path(script).name}: error: ")
    assert message in line.replace(f"{bad}/", "").replace(f"{good}/", "")
    # Nothing was written but, at most, an empty folder for what was to come.
    assert sorted([*good.rglob("*"), *bad.rglob("*")]) == before
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.name[0] != "."] == []


def ended(command: list, folder: Path, **environment: str) -> str:
    """The one line with which a process ends that has to fail."""
    home = {name: os.environ[name] for name in ("PATH", "HF_HOME", "HOME") if name in os.environ}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**home, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stdout
    (line,) = lines_of(done.stderr)
    return line


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "message"), PROCESSES)
def test_a_process_of_its_own_says_it_in_one_line(good, bad, tmp_path, arguments, message):
    script, *flags = arguments.format(good=good, bad=bad).split()
    line = ended([sys.executable, ROOT / script, *flags], tmp_path)
    assert message.format(good=good, bad=bad) in line


@pytest.mark.slow
@pytest.mark.parametrize(("script", "environment", "message"), SHELLS)
def test_a_recipe_says_it_in_one_line(tmp_path, script, environment, message):
    copy = tmp_path / script.partition("/")[0]
    # What the machine has downloaded beside the recipe is no part of the test.
    ignored = shutil.ignore_patterns("pretrained_checkpoints", "data", "vocab", "trained_models")
    shutil.copytree(ROOT / copy.name, copy, ignore=ignored)
    environment = {**environment, "PYTHONPATH": str(ROOT)}
    assert message in ended(["bash", tmp_path / script], copy, **environment)


def test_the_tables_are_as_long_as_they_claim():
    """Forty kinds of input, over every script that is an entry point."""
    scripts = {*CALLS, *(row[0].split()[0] for row in PROCESSES)}
    assert len({message for _, _, message in ROWS}) >= 40
    entries = [
        path.relative_to(ROOT)
        for folder in ("examples", "utils", "NLG/src", "NLG/eval", "NLU")
        for path in (ROOT / folder).rglob("*.py")
        if "transformers" not in path.parts and '__name__ == "__main__"' in path.read_text("utf-8")
    ]
    others = {"examples/quickstart_summary.py", "NLG/src/download.py"}
    assert {entry.as_posix() for entry in entries} - others == scripts
