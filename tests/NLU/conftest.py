"""Fixtures of the NLU tests."""

import json
import random
import shutil
from pathlib import Path
from types import ModuleType

import pytest
from adapted_encoders import settings_of
from encoder_options import RELATIVE
from paths import load_script

# fmt: off
WORDS = [
    "the", "a", "this", "that", "every", "some", "dog", "cat", "house", "river", "teacher", "song",
    "story", "letter", "window", "is", "was", "runs", "sings", "sees", "finds", "likes", "reads",
    "very", "not", "never", "often", "quickly", "warm", "cold", "bright", "quiet", "good", "bad",
    "great", "awful", "in", "on", "under", "near", "with", "without", "and", "or", "because",
]
# fmt: on


@pytest.fixture(scope="session")
def run_glue() -> ModuleType:
    """The script; `run_glue.main(arguments)` runs it in this process."""
    return load_script("examples/text-classification/run_glue.py")


@pytest.fixture(scope="session")
def split_lora() -> ModuleType:
    """The script; `split_lora.main(arguments)` runs it in this process."""
    return load_script("utils/split_lora.py")


def _sentence(chance: random.Random) -> str:
    return " ".join(chance.choices(WORDS, k=chance.randint(3, 14)))


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory) -> Path:
    """A folder with a RoBERTa base of 2 layers, 32 wide, with dropout, and a tokenizer."""
    import torch
    from tokenizers import ByteLevelBPETokenizer

    from transformers import RobertaConfig, RobertaModel, RobertaTokenizerFast

    folder = tmp_path_factory.mktemp("base") / "tiny"
    folder.mkdir()
    chance = random.Random(1)
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        [_sentence(chance) for _ in range(200)],
        vocab_size=400,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        show_progress=False,
    )
    tokenizer = RobertaTokenizerFast(*bpe.save_model(str(folder)), model_max_length=64)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    config = RobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=66,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
        initializer_range=0.2,
    )
    RobertaModel(config, add_pooling_layer=False).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def base_without_dropout(tiny_base, tmp_path_factory) -> Path:
    """`tiny_base` without dropout."""
    folder = tmp_path_factory.mktemp("base") / "steady"
    shutil.copytree(tiny_base, folder)
    config = json.loads((folder / "config.json").read_text())
    config.update(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def tiny_deberta_base(tiny_glue, tmp_path_factory) -> Path:
    """A folder with a DeBERTa-v2 base of 2 layers, 32 wide, with xxlarge's options."""
    import sentencepiece
    import torch
    from make_deberta_tokenizer_fixture import PIECES

    from transformers import DebertaV2Config, DebertaV2Model, DebertaV2Tokenizer

    folder = tmp_path_factory.mktemp("base") / "tiny_deberta"
    folder.mkdir()
    lines = (tiny_glue / "RTE" / "train.tsv").read_text(encoding="utf-8").splitlines()[1:]
    with open(folder / "spm.model", "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(text for line in lines for text in line.split("\t")[1:3]),
            model_writer=file,
            vocab_size=80,
            hard_vocab_limit=False,
            **PIECES,
            minloglevel=2,
        )
    tokenizer = DebertaV2Tokenizer(folder / "spm.model", model_max_length=64)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    config = DebertaV2Config(
        vocab_size=len(tokenizer) + 5,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
        relative_attention=True,
        position_buckets=16,
        pos_att_type="p2c|c2p",
        share_att_key=True,
        norm_rel_ebd="layer_norm",
        position_biased_input=False,
        conv_kernel_size=3,
        conv_act="gelu",
        initializer_range=0.2,
    )
    DebertaV2Model(config).save_pretrained(folder)
    return folder


SHAPE = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "initializer_range": 0.2,
}


@pytest.fixture(scope="session")
def make_classifier():
    """Makes a classifier of a family, "roberta" or "deberta", in evaluation mode.

    LoRA's B, adapters and biases are random too, so that they show in the logits.
    """
    import torch

    from transformers import (
        DebertaV2Config,
        DebertaV2ForSequenceClassification,
        RobertaConfig,
        RobertaForSequenceClassification,
    )

    def make(family: str, **settings):
        torch.manual_seed(0)
        if family == "roberta":
            config = RobertaConfig(**{**SHAPE, "type_vocab_size": 1, **settings})
            model = RobertaForSequenceClassification(config)
        else:
            config = DebertaV2Config(**{**SHAPE, **RELATIVE, **settings})
            model = DebertaV2ForSequenceClassification(config)
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "adapter" in name or "bias" in name:
                parameter.data.normal_(std=0.2)
        return model.eval()

    return make


@pytest.fixture
def lora_classifier(make_classifier):
    """Makes a classifier with LoRA on query and value, of which only LoRA and the head train."""

    def make(family: str, **settings):
        lora = {"apply_lora": True, "lora_r": 4, "lora_alpha": 8}
        model = make_classifier(family, **{"num_labels": 2, "pad_token_id": 1, **lora, **settings})
        model.train_only(("lora",))
        return model

    return make


@pytest.fixture
def batch() -> dict:
    """Four rows of 4 to 11 tokens, padded, with labels of three classes; for either family."""
    import torch

    generator = torch.Generator().manual_seed(5)
    lengths = torch.tensor([11, 4, 9, 7])
    mask = (torch.arange(11) < lengths[:, None]).long()
    ids = torch.randint(5, 60, (4, 11), generator=generator)
    ids[:, 0] = 2
    return {
        "input_ids": ids.masked_fill(mask == 0, 1),
        "attention_mask": mask,
        "labels": torch.tensor([2, 0, 1, 1]),
    }


def _write_tsv(path: Path, header: list[str] | None, rows: list[tuple]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [header, *rows] if header else rows
    text = "".join("\t".join(map(str, line)) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8")


@pytest.fixture(scope="session")
def tiny_glue(tmp_path_factory) -> Path:
    """A folder with RTE, CoLA, SST-2 and MNLI in GLUE's files: 45 rows to train, 13 dev, 7 test.

    Labels can be learned: they follow from words such as "not" or "good", or from the length.
    """
    root = tmp_path_factory.mktemp("glue")
    chance = random.Random(2)
    for split, count in (("train", 45), ("dev", 13), ("test", 7)):
        pairs = [(_sentence(chance), _sentence(chance)) for _ in range(count)]
        first = [pair[0] for pair in pairs]
        good = [int("good" in text or "great" in text) for text in first]
        entails = ["entailment" if "not" in b else "not_entailment" for _, b in pairs]
        nli = [("entailment", "neutral", "contradiction")[len(b.split()) % 3] for _, b in pairs]
        labeled = split != "test"

        def rows(*columns, label, labeled=labeled, count=count):
            return list(zip(range(count), *columns, *([label] if labeled else []), strict=True))

        a, b = zip(*pairs, strict=True)
        header = ["index", "sentence1", "sentence2", "label"][: 4 if labeled else 3]
        _write_tsv(root / "RTE" / f"{split}.tsv", header, rows(a, b, label=entails))
        if labeled:
            cola = [("src", label, "", text) for label, text in zip(good, first, strict=True)]
            _write_tsv(root / "CoLA" / f"{split}.tsv", None, cola)
            sst = list(zip(first, good, strict=True))
            _write_tsv(root / "SST-2" / f"{split}.tsv", ["sentence", "label"], sst)
        else:
            for folder in ("CoLA", "SST-2"):
                one = rows(first, label=good)
                _write_tsv(root / folder / "test.tsv", ["index", "sentence"], one)
        header = ["index", "sentence1", "sentence2", "gold_label"][: 4 if labeled else 3]
        for half in ("",) if split == "train" else ("_matched", "_mismatched"):
            some = rows(a, b, label=nli)[: count - len(half) // 3]
            _write_tsv(root / "MNLI" / f"{split}{half}.tsv", header, some)
    return root


@pytest.fixture
def make_model(tiny_base):
    """Makes a classifier on `tiny_base`, with LoRA or without; keyword arguments are settings."""
    import torch

    from transformers import RobertaForSequenceClassification

    def make(
        dropout: float = 0.0, lora: bool = True, **settings
    ) -> RobertaForSequenceClassification:
        torch.manual_seed(0)
        if lora:
            settings = {"apply_lora": True, "lora_r": 4, "lora_alpha": 8, **settings}
        model = RobertaForSequenceClassification.from_pretrained(
            tiny_base,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            **settings,
        )
        if lora:
            model.train_only(("lora",))
        return model

    return make


@pytest.fixture
def make_trainer(make_model, tmp_path):
    """Makes a Trainer on 20 rows; keyword arguments are its own, or settings."""
    from trainer_runs import collate, make_data

    from transformers import Trainer, TrainingArguments

    def make(
        model=None,
        kind: type[Trainer] = Trainer,
        train=None,
        evaluated=None,
        dropout: float = 0.0,
        compute_metrics=None,
        callbacks=None,
        optimizers=(None, None),
        **settings,
    ) -> Trainer:
        defaults = {
            "output_dir": str(tmp_path / "out"),
            "report_to": ["none"],
            "disable_tqdm": True,
            "per_device_train_batch_size": 4,
            "num_train_epochs": 2,
            "learning_rate": 1e-2,
            "save_strategy": "no",
        }
        return kind(
            make_model(dropout) if model is None else model,
            TrainingArguments(**{**defaults, **settings}),
            collate,
            make_data(20) if train is None else train,
            make_data(9) if evaluated is None else evaluated,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
        )

    return make


@pytest.fixture
def glue(run_glue, tiny_base, monkeypatch, tmp_path):
    """Runs run_glue.py in this process on the tiny base, with additional arguments."""
    from glue_runs import common

    monkeypatch.chdir(tmp_path)

    def call(*arguments, base=tiny_base) -> None:
        run_glue.main([*common(base), *map(str, arguments)])

    return call


@pytest.fixture(scope="module")
def trained(run_glue, tiny_base, tiny_glue, tmp_path_factory) -> Path:
    """The output folder of a run on RTE: training, evaluation and prediction."""
    from glue_runs import common, on_rte

    out = tmp_path_factory.mktemp("rte") / "out"
    arguments = [*common(tiny_base), *on_rte(tiny_glue, out), "--do_predict"]
    run_glue.main(list(map(str, arguments)))
    return out


@pytest.fixture
def build_adapted(make_classifier):
    """Makes a classifier of three classes with the named adaptations, and freezes the rest."""

    def make(family, names=(), **settings):
        settings = {"num_labels": 3, "pad_token_id": 1, **settings_of(names), **settings}
        model = make_classifier(family, **settings)
        if model.adapted_by:
            model.train_only(kind.part for kind in model.adapted_by)
        return model

    return make
