"""Valid files of every kind, and files that are wrong in one way each."""

import json
import shutil
from pathlib import Path

SENTENCES = ["the dog runs", "a cat sings a song", "this river is cold", "some letters are not"]


def write_lines(path: Path, rows: list) -> Path:
    """Writes rows as JSON lines."""
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


def write_good(folder: Path) -> Path:
    """Fills a folder with valid files."""
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
    write_lines(folder / "tags.json", [{"tokens": ["Ann", "ran"], "ner_tags": ["B-PER", "O"]}] * 2)
    rows = [{"context": text, "completion": text} for text in SENTENCES]
    write_lines(folder / "formatted.jsonl", rows)
    write_lines(folder / "encoded.jsonl", [{"context": [1, 2], "completion": [3, 4]}] * 4)
    write_lines(folder / "predicted.jsonl", [{"id": n, "predict": [1]} for n in range(4)])
    for name in ("references", "predictions"):
        (folder / name).write_text("a text\n")
    return folder


# Folder of a wrong base -> the setting in its config.json that is wrong.
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


# Text files, by name; those in UTF-16 are made from valid ones.
TEXTS = {
    "repeated.csv": "text,label,label\na,1,0\nb,0,1\n",
    "shifted.csv": "text,label\nx,a dog,1\ny,a cat,0\n",
    "ids.csv": "id,n,label\nx,1,0\ny,2,1\n",
    "three.csv": "a,b,c,label\nx,y,z,0\nz,y,x,1\n",
    "class.csv": "text,label\na,1\nb,1\n",
    "blank.csv": "text,label\na,1\nb,\n",
    "object.json": '{"text": {"a": "b"}, "label": 1}\n{"text": {"a": "c"}, "label": 0}\n',
    "list.json": '{"text": "a", "label": 1}\n{"text": ["a"], "label": 0}\n',
    "tags.json": '{"tokens": ["Ann", "ran"], "ner_tags": ["O"]}\n',
    "one_tag.json": '{"tokens": ["Ann", "ran"], "ner_tags": ["O", "O"]}\n' * 2,
    "unknown_tag.json": '{"tokens": ["in", "Paris"], "ner_tags": ["O", "B-LOC"]}\n',
    "span.json": (
        '{"question": "Who?", "context": "Ann ran.", '
        '"answers": {"text": ["Ann"], "answer_start": [6]}}\n'
    ),
    "unanswered.json": (
        '{"question": "Who?", "context": "Ann ran.", "answers": {"text": [], "answer_start": []}}\n'
    ),
    "endings.json": (
        '{"sent1": "a", "sent2": "b", "ending0": "c", "ending1": "d", "ending2": "e", "label": 0}\n'
        '{"sent1": "a", "sent2": "b", "ending0": "c", "ending1": "d", "label": 0}\n'
    ),
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


def write_bad(folder: Path, good: Path) -> Path:
    """Fills a folder with files that are wrong in one way each."""
    for name, content in TEXTS.items():
        (folder / name).write_text(content)
    for name in ("train.json", "corpus.txt", "texts.jsonl", "formatted.jsonl", "encoded.jsonl"):
        text = (good / name).read_text()
        (folder / f"utf16_{name}").write_text(text, encoding="utf-16")
    (folder / "latin").write_bytes("caf\xe9\n".encode("latin1"))
    (folder / "mark").write_text("\n", encoding="utf-8-sig")  # a byte-order mark and no text
    for name, settings in CONFIGS.items():
        shutil.copytree(good / "base", folder / name)
        values = json.loads((folder / name / "config.json").read_text())
        (folder / name / "config.json").write_text(json.dumps({**values, **settings}))
    shutil.copytree(good / "base", folder / "id_beyond")
    (folder / "id_beyond" / "tokenizer.json").unlink()
    vocabulary = json.loads((good / "base" / "vocab.json").read_text())
    vocabulary["Ġr"] = len(vocabulary)
    (folder / "id_beyond" / "vocab.json").write_text(json.dumps(vocabulary))
    for name, settings in GPT2_CONFIGS.items():
        (folder / name).mkdir()
        values = {**GPT2, "n_positions": 30, **settings}
        (folder / name / "config.json").write_text(json.dumps(values))
        (folder / name / "model.safetensors").write_text("not read before the settings are")
    make_gpt2(folder)
    (folder / "peft").mkdir()
    (folder / "peft" / "adapter_config.json").write_text(
        '{"base_model_name_or_path": "roberta-base"}'
    )
    (folder / "RTE").mkdir()
    shutil.copy(folder / "rte.tsv", folder / "RTE" / "train.tsv")
    return folder
