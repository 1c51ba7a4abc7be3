"""The starting point of a run, and the files and settings that its flags name."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from adapter_files import INFOS, tensors_of

from loralib.adapters.adapter import Adapter
from loralib.errors import AlphaError
from transformers import RobertaConfig, TrainingArguments
from transformers.adapter_kinds import BITFIT
from transformers.fine_tuning import adapted_model
from transformers.fine_tuning.adapted_model import (
    check_arguments,
    keep_to_layers,
    leave_out_missing,
    load_config,
    open_tokenizer,
    read_adapters,
)
from transformers.fine_tuning.arguments import AdaptedModelArguments
from transformers.fine_tuning.starting_point import StartingPoint, starting_point_of

ORIGIN = StartingPoint("a file", ("no", "yes"), "rte", ("premise", "claim"), 2, is_adapter=True)


def flags(**given):
    return AdaptedModelArguments(**{"model_name_or_path": "some/base", **given})


def adapter_of(source="a file", **metadata):
    return Adapter(tensors_of("roberta"), replace(INFOS["roberta"], **metadata), source=source)


# ---- the starting point ----


def test_unnamed_classes_are_refused():
    ORIGIN.check_named()
    unnamed = replace(ORIGIN, labels=())
    with pytest.raises(ValueError, match=r"^a file does not name its tags; give the --train_file"):
        unnamed.check_named("tags")
    with pytest.raises(ValueError, match=r"; give --apply_lora .* where it is a base, else the --"):
        replace(unnamed, is_adapter=False).check_named()


@pytest.mark.parametrize(
    ("own", "task", "fits"),
    [("rte", "rte", True), (None, "rte", True), ("rte", None, True), ("rte", "mnli", False)],
)
def test_evaluation_on_another_task_is_refused(caplog, own, task, fits):
    origin = replace(ORIGIN, task=own)
    origin.check_task(task, training=True)
    expected = "a file was trained for rte: training on mnli starts from it"
    assert caplog.messages == ([] if fits else [expected])
    if fits:
        origin.check_task(task, training=False)
    else:
        with pytest.raises(ValueError, match=r"^a file was trained for rte, not for mnli$"):
            origin.check_task(task, training=False)


@pytest.mark.parametrize(
    ("own", "labels", "order"),
    [
        ("abc", "abc", (0, 1, 2)),
        ("abc", "CAB", (2, 0, 1)),
        ("abc", "abd", ()),
        ("abc", "ab", ()),
        ("ab", "abb", ()),
        ("aAb", "aAb", ()),  # ambiguous, as case is ignored
        ("", "", ()),
    ],
)
def test_classes_are_matched_in_any_order_and_case(own, labels, order):
    assert replace(ORIGIN, labels=tuple(own)).order_of(list(labels)) == order


@pytest.mark.parametrize(
    ("own", "labels", "fits", "warned"),
    [
        (("no", "yes"), ("no", "yes"), True, False),
        ((), ("no", "yes"), True, False),
        (("no", "yes"), (), True, False),
        (("no", "yes"), ("yes", "no"), False, True),
        (("no", "yes"), ("a", "b", "c"), False, False),  # training gives these a new head
    ],
)
def test_evaluation_on_other_classes_is_refused(caplog, own, labels, fits, warned):
    origin = replace(ORIGIN, labels=own)
    origin.check_labels(labels, training=True)
    expected = f"a file was trained for the labels no, yes: its head is now trained for {labels}"
    assert [text.partition(":")[0] for text in caplog.messages] == (
        [expected.partition(":")[0]] if warned else []
    )
    if fits:
        origin.check_labels(labels, training=False)
    else:
        with pytest.raises(ValueError, match=r"^a file was trained for the labels no, yes; the"):
            origin.check_labels(labels, training=False)


@pytest.mark.parametrize(
    ("own", "columns", "level"),
    [
        (("premise", "claim"), ("premise", "claim"), None),
        ((), ("premise", "claim"), None),
        (("text",), ("sentence",), "INFO"),
        (("premise", "claim"), ("premise", "second"), "WARNING"),
        (("premise", "claim"), ("claim", "premise"), ValueError),
        (("premise", "claim"), ("first", "premise"), ValueError),
        (("premise", "claim"), ("premise",), ValueError),
        (("text",), ("text", "more"), ValueError),
    ],
)
def test_other_text_columns_are_logged_or_refused(caplog, own, columns, level):
    caplog.set_level("INFO")
    origin = replace(ORIGIN, texts=own)
    origin.check_texts(columns, training=True)
    assert not caplog.records
    if level is ValueError:
        named = (
            f"trained on rows of {' and '.join(own)}, not of {' and '.join(columns)}; in your own"
        )
        with pytest.raises(ValueError, match=named):
            origin.check_texts(columns, training=False)
        return
    origin.check_texts(columns, training=False)
    assert [record.levelname for record in caplog.records] == ([level] if level else [])


def test_the_starting_point_is_the_first_adapter_or_the_model():
    """Task, labels and columns come from the first adapter that has metadata."""
    config = RobertaConfig(num_labels=3, finetuning_task="mnli")
    config.text_columns = ["a", "b"]
    model = StartingPoint("some/base", (), "mnli", ("a", "b"), 3, is_adapter=False)
    assert starting_point_of(flags(), config, []) == model
    config.id2label = {number: f"class {number}" for number in reversed(range(12))}
    names = tuple(f"class {number}" for number in range(12))
    assert starting_point_of(flags(), config, []) == replace(model, labels=names, outputs=12)
    silent = Adapter(tensors_of("roberta"), None, source="silent")
    second = adapter_of("second", task="rte")
    found = starting_point_of(flags(), config, [silent, second])
    assert found == StartingPoint("silent", ("no", "yes"), "rte", ("premise", "claim"), 2, True)
    unnamed = adapter_of(labels=None, text_columns=None, task=None)
    assert starting_point_of(flags(), config, [unnamed]) == StartingPoint(
        "a file", names, None, (), 2, True
    )


# ---- files and the hub ----


def test_config_and_tokenizer_come_with_the_model_by_default(monkeypatch):
    """From the same cache and revision, with the same token."""
    asked = []

    def ask(name, *more, return_unused_kwargs=None, **settings):
        place = {key: settings[key] for key in ("cache_dir", "revision", "use_auth_token")}
        asked.append((name, *place.values(), settings.get("use_fast")))
        return RobertaConfig(), {}

    monkeypatch.setattr(adapted_model, "load_tokenizer", ask)
    monkeypatch.setattr(adapted_model, "AutoConfig", SimpleNamespace(from_pretrained=ask))
    place = {"cache_dir": "cache", "model_revision": "old", "use_auth_token": True}
    for more in ({}, {"config_name": "c", "tokenizer_name": "t", "use_fast_tokenizer": False}):
        given = flags(**place, **more)
        load_config(given)
        open_tokenizer(given, RobertaConfig())
    assert asked == [
        ("some/base", "cache", "old", True, None),
        ("some/base", "cache", "old", True, True),
        ("c", "cache", "old", True, None),
        ("t", "cache", "old", True, False),
    ]
    with pytest.raises(ValueError, match=r"^--use_fast_tokenizer False: only a fast tokenizer"):
        open_tokenizer(given, RobertaConfig(), aligned=True)


def test_a_setting_that_the_model_does_not_have_is_refused(monkeypatch):
    """One of another family, for instance, would have no effect."""

    def ask(name, **settings):
        return RobertaConfig(), {"lora_positions": settings["lora_positions"]}

    monkeypatch.setattr(adapted_model, "AutoConfig", SimpleNamespace(from_pretrained=ask))
    with pytest.raises(ValueError, match="a roberta model has no setting lora_positions, which"):
        load_config(flags(apply_lora=True, lora_positions=True))


def test_adapters_are_read_with_the_flags_for_the_hub_and_alpha(monkeypatch):
    asked = []
    monkeypatch.setattr(adapted_model, "read_adapter", lambda *_, **where: asked.append(where))
    read_adapters(flags(lora_path="a", cache_dir="cache", use_auth_token=True, lora_alpha=3))
    assert asked == [{"cache_dir": "cache", "token": True, "lora_alpha": 3}]


def test_leave_out_missing_clears_flags_of_missing_files_with_a_warning(tmp_path, caplog):
    there = tmp_path / "there.bin"
    there.touch()
    given = flags(lora_path=str(tmp_path / "missing.bin"), bitfit_path=str(there))
    leave_out_missing(given)
    assert (given.lora_path, given.adapter_path, given.bitfit_path) == (None, None, str(there))
    (text,) = caplog.messages
    assert text.startswith(f"--lora_path {tmp_path / 'missing.bin'} does not exist: ")


# ---- flags from a file's metadata ----


def test_a_file_fills_in_flags_that_are_not_given(tmp_path):
    run = TrainingArguments(output_dir=str(tmp_path / "out"), do_train=True)
    given = flags(apply_lora=True)
    check_arguments(given, run, [adapter_of(rank_pattern={"query": 1})])
    assert (given.lora_r, given.lora_alpha) == (2, 3)
    assert given.lora_targets == ["query", "value"]
    assert given.lora_rank_pattern == ["query=1"]
    explicit = flags(apply_lora=True, lora_r=4, lora_alpha=16, lora_targets=["key"])
    check_arguments(explicit, run, [adapter_of()])
    assert (explicit.lora_r, explicit.lora_alpha, explicit.lora_targets) == (4, 16, ["key"])


def test_lora_without_metadata_needs_its_alpha(tmp_path):
    """Other kinds of adapters have no alpha."""
    run = TrainingArguments(output_dir=str(tmp_path / "out"), do_eval=True)
    check_arguments(flags(), run, [Adapter({}, None, source="biases", kind=BITFIT)])
    silent = Adapter(tensors_of("roberta"), None, source="a file")
    with pytest.raises(AlphaError, match="a file"):
        check_arguments(flags(apply_lora=True, lora_r=2), run, [silent])


@pytest.mark.parametrize(
    ("layers", "given", "expected"),
    [(3, None, ["0", "1"]), (2, None, None), (3, ["0-2"], ["0-2"])],
)
def test_only_the_layers_of_an_adapter_are_adapted(layers, given, expected):
    model_args = flags(lora_layers=given)
    keep_to_layers(model_args, RobertaConfig(num_hidden_layers=layers), [adapter_of()])
    assert model_args.lora_layers == expected
