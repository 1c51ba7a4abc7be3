"""Pipelines: 4.4.2's answers, the inputs they take, batches, adapters, and what they refuse."""

import json
import logging
import math
from unittest import mock

import make_upstream_4_4_fixture as maker
import numpy as np
import pytest
import torch
from adapted_encoders import settings_of

from loralib import AdapterBank
from transformers import (
    AutoModelForTokenClassification,
    AutoTokenizer,
    DebertaV2Tokenizer,
    DebertaV2TokenizerFast,
    QuestionAnsweringPipeline,
    RobertaTokenizer,
    RobertaTokenizerFast,
    SquadExample,
    TokenClassificationPipeline,
    pipeline,
)
from transformers.pipelines import (
    PipelineException,
    QuestionAnsweringArgumentHandler,
    TokenClassificationArgumentHandler,
    base,
)
from transformers.pipelines.token_classification import Tokens

# In words of several tokens, upstream writes SentencePiece's sign for an unknown piece, not [UNK].
FIXTURE = json.loads(maker.FIXTURE.read_text("utf-8").replace(r" \u2047 ", "[UNK]"))["pipelines"]
FAMILIES = tuple(maker.FAMILIES)
RECORDED = [(family, name) for family in FAMILIES for name in maker.calls_of(family)]
QUESTION, CONTEXT = maker.QUESTION, maker.CONTEXT


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """The fast tokenizers, by family."""
    folder = tmp_path_factory.mktemp("tokenizers")
    kinds = {"roberta": RobertaTokenizerFast, "deberta": DebertaV2TokenizerFast}
    return {
        family: kind.from_pretrained(maker.write_tokenizer(family, folder / family))
        for family, kind in kinds.items()
    }


@pytest.fixture(scope="module")
def slow_deberta(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slow")
    return DebertaV2Tokenizer.from_pretrained(maker.write_tokenizer("deberta", folder))


@pytest.fixture(scope="module")
def models():
    """The models, by family and task."""
    return {
        (family, task): maker.build_model(family, task)
        for family in FAMILIES
        for task in maker.TASKS
    }


@pytest.fixture
def make(tokenizers, models):
    """Makes a task's pipeline of a family."""

    def make(family, task, **settings):
        return pipeline(task, models[family, task], tokenizer=tokenizers[family], **settings)

    return make


def same(ours, theirs):
    """Whether answers are equal, with numbers up to float32's rounding of a probability."""
    if isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=2e-4, abs_tol=1e-6)
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same(ours[k], theirs[k]) for k in theirs)
    if isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return ours == theirs


# ---- 4.4.2's answers ----


@pytest.mark.parametrize(("family", "name"), RECORDED)
def test_answers_are_upstreams(models, tokenizers, slow_deberta, family, name):
    """With 4.4.2's tokenizers: it has none of DeBERTa-v2 that gives offsets."""
    tokenizer = tokenizers[family] if family == "roberta" else slow_deberta
    ours = maker.answer(name, models[family, maker.CALLS[name][0]], tokenizer)
    assert same(ours, FIXTURE[family][name])


def test_the_recorded_answers_are_not_trivial():
    """They have several labels, groups of several tokens, and answers in several places."""
    entities = [e for row in FIXTURE["roberta"]["every label"] for e in row]
    assert len({entity["entity"] for entity in entities}) >= 3
    assert len([e for row in FIXTURE["roberta"]["groups of every label"] for e in row]) < len(
        entities
    )
    assert len({answer["start"] for answer in FIXTURE["roberta"]["answers"]}) > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_offsets_are_those_of_the_text(make, family):
    """DeBERTa's space before a word may be a token of its own."""
    sentence = maker.SENTENCES[1]
    for entity in make(family, "ner", ignore_labels=[])(sentence):
        word, found = entity["word"].lstrip("Ġ▁"), sentence[entity["start"] : entity["end"]]
        assert found == word or (entity["word"], found) == ("▁", " ")


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_whole_words_of_the_text(make, family):
    ask = make(family, "question-answering")
    text = "the dog is in Paris"
    answers = ask(question=QUESTION, context=text, topk=8)
    for answer in answers:
        start, end = answer["start"], answer["end"]
        assert text[start:end] == answer["answer"] == answer["answer"].strip()
        around = text[max(start - 1, 0) : start] + text[end : end + 1]
        assert not any(character.isalnum() for character in around)
    assert [answer["score"] for answer in answers] == sorted(
        (answer["score"] for answer in answers), reverse=True
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_no_answer_has_the_least_score_of_all_parts(make, family, tokenizers, models):
    """In each part, it is the first token's probability as the start times that as the end."""
    tokenizer, model = tokenizers[family], models[family, "question-answering"]
    limits = {"max_seq_len": 32, "doc_stride": 8}
    answers = make(family, "question-answering")(
        QUESTION, CONTEXT, handle_impossible_answer=True, topk=10**6, **limits
    )
    (empty,) = (answer for answer in answers if answer["answer"] == "")
    encoded = tokenizer(
        QUESTION,
        CONTEXT,
        truncation="only_second",
        max_length=32,
        stride=8,
        return_overflowing_tokens=True,
    )
    scores = []
    for number, ids in enumerate(encoded["input_ids"]):
        keep = [0] + [i for i, of in enumerate(encoded.sequence_ids(number)) if of == 1]
        types = encoded.get("token_type_ids")
        given = {} if types is None else {"token_type_ids": torch.tensor([types[number]])}
        with torch.no_grad():
            output = model(torch.tensor([ids]), **given)
        start, end = (logits[0, keep].softmax(0)[0] for logits in output.to_tuple()[:2])
        scores.append(float(start * end))
    assert len(scores) > 1
    assert empty["score"] == pytest.approx(min(scores), rel=1e-3)
    assert (empty["start"], empty["end"]) == (0, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_compete_with_the_context_and_with_no_answer(make, family, tokenizers, models):
    """The first token, for "no answer", takes part if its id is not 0; the question does not."""
    tokenizer, model = tokenizers[family], models[family, "question-answering"]
    answers = make(family, "question-answering")(QUESTION, CONTEXT, topk=10**6, max_answer_len=1)
    encoded = tokenizer(QUESTION, CONTEXT, return_tensors="pt")
    text = [i for i, of in enumerate(encoded.sequence_ids(0)) if of == 1]
    keep = [0, *text] if family == "deberta" else text
    with torch.no_grad():
        logits = model(**encoded).to_tuple()[:2]
    start, end = (each[0, keep].softmax(0)[-len(text) :] for each in logits)
    assert sum(a["score"] for a in answers) == pytest.approx(float(start @ end), rel=1e-3)


def test_tokens_of_nothing_but_space_keep_their_offsets(make):
    found = make("roberta", "ner", ignore_labels=[])("\n Ann")
    assert (found[0]["word"], found[0]["start"], found[0]["end"]) == ("Ċ", 0, 1)
    ask = make("roberta", "question-answering")
    answers = ask(question=QUESTION, context="Ann\n\nran\t\tBob\n", topk=300, max_answer_len=2)
    assert all(answer["answer"] and answer["end"] > answer["start"] for answer in answers)
    assert any(answer["answer"].isspace() for answer in answers)


def test_the_likeliest_spans():
    """Scores are products of a start and an end that is not before it, nor too far from it."""
    rng = np.random.default_rng(0)
    start, end = rng.random(9), rng.random(9)
    decode = QuestionAnsweringPipeline.decode
    first, last, scores = decode(None, start, end, 12, 4)
    expected = sorted(
        ((start[i] * end[j], i, j) for i in range(9) for j in range(i, min(i + 4, 9))),
        reverse=True,
    )[:12]
    assert list(zip(scores, first, last, strict=True)) == expected
    assert len(decode(None, start[:2], end[:2], 20, 4)[0]) == 3


# ---- groups ----


def entity(label, index, score, word, start, end, is_subword=False):
    return {
        "entity": label,
        "index": index,
        "score": score,
        "word": word,
        "start": start,
        "end": end,
        "is_subword": is_subword,
    }


FOUND = [
    entity("B-PER", 1, 0.9, "An", 0, 2),
    entity("B-LOC", 2, 0.5, "na", 2, 4, True),
    entity("I-PER", 3, 0.7, "ĠLee", 5, 8),
    entity("B-PER", 4, 0.8, "ĠBen", 9, 12),
    entity("I-PER", 6, 0.6, "ĠI", 15, 16),
    entity("I-LOC", 7, 0.4, "ĠRome", 17, 21),
    entity("LOC", 8, 0.2, "Ġand", 22, 25),
]


def groups_of(make, **settings):
    pipe = make("roberta", "ner", grouped_entities=True, **settings)
    with mock.patch.object(pipe.tokenizer, "convert_tokens_to_string", "".join):
        found = pipe.group_entities(FOUND)
    assert all(group.keys() == {"entity_group", "score", "word", "start", "end"} for group in found)
    return [(g["entity_group"], g["word"], g["start"], g["end"], g["score"]) for g in found]


def test_groups_of_entities(make):
    assert groups_of(make) == [
        ("PER", "An", 0, 2, 0.9),
        ("LOC", "na", 2, 4, 0.5),
        ("PER", "ĠLee", 5, 8, 0.7),
        ("PER", "ĠBen", 9, 12, 0.8),
        ("PER", "ĠI", 15, 16, 0.6),
        ("LOC", "ĠRomeĠand", 17, 25, pytest.approx(0.3)),
    ]


def test_groups_without_subwords(make):
    """A word's later tokens belong to the first one's group, and do not count in its score."""
    found = groups_of(make, ignore_subwords=True)
    assert found[:2] == [
        ("PER", "Anna", 0, 4, 0.9),
        ("PER", "ĠLee", 5, 8, 0.7),
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_subwords_are_later_tokens_of_a_word(make, family, tokenizers):
    settings = {"ignore_labels": [], "grouped_entities": True, "ignore_subwords": True}
    pipe = make(family, "ner", **settings)
    seen = []
    with mock.patch.object(pipe, "group_entities", seen.append):
        pipe(maker.SENTENCES[1])
    words = tokenizers[family](maker.SENTENCES[1]).word_ids()
    assert [each["is_subword"] for each in seen[0]] == [
        words[each["index"]] == words[each["index"] - 1] for each in seen[0]
    ]
    assert any(each["is_subword"] for each in seen[0])


@pytest.mark.parametrize(
    ("ignore_subwords", "found"), [(True, [("PER", 0, 4)]), (False, [("PER", 0, 2), ("LOC", 7, 8)])]
)
def test_ignore_subwords_gives_words_the_label_of_their_first_token(make, ignore_subwords, found):
    """An entity ends with its word, and a later token does not make one of an unlabeled word."""
    settings = {"grouped_entities": True, "ignore_subwords": ignore_subwords}
    pipe = make("roberta", "ner", **settings)
    places = [(0, 0), (0, 2), (2, 4), (5, 7), (7, 8), (0, 0)]
    words = [None, 0, 0, 1, 1, None]
    tokens = Tokens("Anna runs", [0, 5, 6, 7, 8, 2], [1, 0, 0, 0, 0, 1], places, words)
    scores = np.eye(3)[[0, 1, 0, 0, 2, 0]]
    with mock.patch.object(pipe.model.config, "id2label", {0: "O", 1: "B-PER", 2: "B-LOC"}):
        groups = pipe.group_entities(pipe._entities(tokens, scores))
    assert [(each["entity_group"], each["start"], each["end"]) for each in groups] == found


def test_a_slow_tokenizer_gives_no_offsets(models, tmp_path):
    slow = RobertaTokenizer.from_pretrained(maker.write_tokenizer("roberta", tmp_path))
    model = models["roberta", "ner"]
    (first, *_) = pipeline("ner", model, tokenizer=slow, ignore_labels=[])("a song")
    assert (first["start"], first["end"], first["index"]) == (None, None, 1)
    with pytest.raises(ValueError, match="ignore_subwords needs a fast tokenizer"):
        pipeline("ner", model, tokenizer=slow, ignore_subwords=True)
    with pytest.raises(ValueError, match="question answering needs a fast tokenizer"):
        pipeline("question-answering", models["roberta", "question-answering"], tokenizer=slow)


# ---- inputs ----


@pytest.mark.parametrize("family", FAMILIES)
def test_each_question_has_an_answer(make, family):
    """SentencePiece makes no tokens of a blank text."""
    ask = make(family, "question-answering")
    answers = ask(question=[QUESTION, QUESTION], context=[" ", CONTEXT])
    assert [answer["answer"] == "" for answer in answers] == [True, False]
    assert answers[1] == ask(QUESTION, CONTEXT)


def test_questions_in_every_form():
    handle = QuestionAnsweringArgumentHandler()
    both = {"question": "q", "context": "c"}
    one = SquadExample(None, "q", "c")
    for found in (
        handle("q", "c"),
        handle(both),
        handle([both]),
        handle(one),
        handle(**both),
        handle(X=both),
        handle(data=[both]),
    ):
        assert found == [one]
    for found in (
        handle(["q", "q"], "c"),
        handle(question=["q", "q"], context=["c", "c"]),
        handle([both, one]),
    ):
        assert found == [one, one]
    assert QuestionAnsweringPipeline.create_sample("q", "c") == one
    assert QuestionAnsweringPipeline.create_sample(["q"], ["c"]) == [one]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (({"context": "c"},), KeyError, "there is no 'question'"),
        (({"question": "q"},), KeyError, "there is no 'context'"),
        (({"question": "", "context": "c"},), ValueError, "the question must be a text"),
        (({"question": "q", "context": None},), ValueError, "the context must be a text"),
        ((None, "c"), ValueError, "the question must be a text"),
        (("q", ""), ValueError, "the context must be a text"),
        (({"a": 1}, "c"), ValueError, "question is a text or a list of texts"),
        ((["q", "q"], ["c"]), ValueError, "2 questions, but 1 contexts"),
        ((None,), ValueError, "are two texts, not None"),
        ((1,), ValueError, "are two texts, not 1"),
        (([1],), ValueError, "are in a dict, not 1"),
        ((), ValueError, "a question and a context are needed"),
    ],
)
def test_bad_questions_are_refused(given, error, message):
    with pytest.raises(error, match=message):
        QuestionAnsweringArgumentHandler()(*given)


def test_given_offsets_have_to_match_the_texts():
    handle = TokenClassificationArgumentHandler()
    one = [(0, 1), (1, 2)]
    assert handle("ab") == (["ab"], None)
    assert handle("ab", offset_mapping=one) == (["ab"], [one])
    assert handle(["ab", "cd"], offset_mapping=[one, one]) == (["ab", "cd"], [one, one])
    for texts, offsets in (("ab", [one, one]), (["ab", "cd"], one), (["ab", "cd"], [one])):
        with pytest.raises(ValueError, match="offsets for"):
            handle(texts, offset_mapping=offsets)


@pytest.mark.parametrize("task", ["sentiment-analysis", "ner", "fill-mask"])
@pytest.mark.parametrize("inputs", [None, [], 5, ["a", 5], {"text": "a"}])
def test_inputs_that_are_not_texts_are_refused(make, task, inputs):
    with pytest.raises(ValueError, match=r"not a text|a text or a list of texts"):
        make("roberta", task)(inputs)


def test_a_text_among_pairs_is_refused(make):
    with pytest.raises(ValueError, match="input 1 is 'a', not a pair of texts"):
        make("roberta", "sentiment-analysis")([["a", "b"], "a"])


@pytest.mark.parametrize("adapted", [False, True])
def test_a_model_that_was_trained_for_something_else_is_refused(tmp_path, tiny_base, adapted):
    """It would answer at random."""
    how = {"apply_lora": True, "lora_r": 2, "lora_alpha": 4} if adapted else {}
    model = AutoModelForTokenClassification.from_pretrained(tiny_base, **how)
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tiny_base).save_pretrained(tmp_path / "model")
    pipeline("ner", model=tmp_path / "model")
    for task in ("sentiment-analysis", "question-answering", "fill-mask"):
        with pytest.raises(PipelineException, match=f"has no trained .* nothing to answer '{task}"):
            pipeline(task, model=tmp_path / "model")


@pytest.mark.parametrize(
    ("columns", "right", "wrong"),
    [
        (["review"], "a", [["a", "b"]]),
        (["review"], ["a", "b"], [["a", "b"], ["c", "d"]]),
        (["premise", "claim"], [["a", "b"]], "a"),
        (["premise", "claim"], [["a", "b"], ["c", "d"]], ["a", "b"]),
    ],
)
def test_single_texts_for_a_model_of_pairs_and_the_reverse_are_refused(
    make, monkeypatch, columns, right, wrong
):
    classify = make("roberta", "sentiment-analysis")
    classify(wrong)
    monkeypatch.setattr(classify.model.config, "text_columns", columns)
    classify(right)
    with pytest.raises(ValueError, match=f"trained on rows of {' and '.join(columns)}$"):
        classify(wrong)


@pytest.mark.parametrize(("text", "found"), [("no mask", "no mask"), ("<mask> <mask>", "2 masks")])
def test_texts_without_exactly_one_mask_are_refused(make, text, found):
    with pytest.raises(PipelineException, match=f"a text has {found}: write <mask> once") as caught:
        make("roberta", "fill-mask")(["a <mask>", text])
    assert caught.value.task == "fill-mask"


@pytest.mark.parametrize(
    ("family", "targets"),
    [("roberta", []), ("roberta", [""]), ("roberta", ""), ("deberta", ["dog", " "])],
)
def test_empty_targets_are_refused(make, tokenizers, family, targets):
    """In RoBERTa's vocabulary, a blank is a token."""
    with pytest.raises(ValueError, match="targets needs at least one word"):
        make(family, "fill-mask")(f"a {tokenizers[family].mask_token}", targets=targets)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mask_is_filled_only_with_tokens_that_exist(make, tokenizers, family):
    """DeBERTa's models have more rows than there are tokens."""
    tokenizer = tokenizers[family]
    answers = make(family, "fill-mask")(f"a {tokenizer.mask_token}", top_k=10**6)
    texts = {answer["token"]: answer["token_str"] for answer in answers}
    # As in transformers 4.4, a special token has a text, too.
    assert texts == {index: tokenizer.decode(index) for index in range(len(tokenizer))}


def test_a_target_of_several_tokens_is_its_first_one(make, tokenizers, caplog):
    tokens = tokenizers["roberta"].tokenize(" qqq")
    with caplog.at_level(logging.WARNING):
        (answer,) = make("roberta", "fill-mask")("a <mask>", targets=[" qqq"])
    assert answer["token"] == tokenizers["roberta"].convert_tokens_to_ids(tokens[0])
    assert "' qqq' is several tokens" in caplog.text


@pytest.mark.parametrize("name", ["topk", "max_answer_len"])
def test_numbers_that_are_too_small_are_refused(make, name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, not 0"):
        make("roberta", "question-answering")(QUESTION, CONTEXT, **{name: 0})


def test_a_question_that_leaves_no_room_is_refused(make):
    with pytest.raises(ValueError, match=r"question 1 has \d+ tokens, which leaves no room"):
        make("roberta", "question-answering")(["who", QUESTION * 9], CONTEXT)


# ---- long texts, batches ----


def test_a_question_is_answered_the_same_next_to_a_longer_one(make):
    """The longer one leaves less room for its own context."""
    ask = make("roberta", "question-answering")
    both = ask(["who", "where is the dog of Ben Lee"], CONTEXT, max_seq_len=48)
    assert same(both[0], ask("who", CONTEXT, max_seq_len=48))
    assert same(both[1], ask("where is the dog of Ben Lee", CONTEXT, max_seq_len=48))


@pytest.mark.parametrize("task", ["sentiment-analysis", "ner"])
def test_long_texts_are_cut_with_one_warning(make, caplog, task):
    pipe = make("roberta", task)
    long, short = "the film is good and " * 40, "a song"
    with caplog.at_level(logging.WARNING, logger="transformers"):
        answers = pipe([short, long])
        pipe([long])
        assert same(answers[0], pipe([short, short])[0])
    cut = [record for record in caplog.records if "are cut" in record.getMessage()]
    assert len(cut) == 1
    assert "the 64 tokens" in cut[0].getMessage()


def test_a_text_that_just_fits_is_not_cut(make, tokenizers, caplog):
    ids = tokenizers["roberta"]("the film is good and " * 40)["input_ids"][1:63]
    text = tokenizers["roberta"].decode(ids)
    assert len(tokenizers["roberta"](text)["input_ids"]) == 64
    with caplog.at_level(logging.WARNING, logger="transformers"):
        make("roberta", "sentiment-analysis")(text)
    assert not caplog.records


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("task", ["sentiment-analysis", "ner", "fill-mask"])
def test_batches_change_no_answer(make, tokenizers, family, task, monkeypatch):
    """They have the longest rows first; the answers keep the texts' order."""
    monkeypatch.setattr(base, "ROWS_PER_BATCH", 2)
    pipe = make(family, task)
    mask = tokenizers[family].mask_token if task == "fill-mask" else "is"
    texts = [f"{'the film ' * (index % 4)}{mask} good {'s' * index}" for index in range(7)]
    lengths = []

    def record_lengths(rows):
        lengths.append([len(row["input_ids"]) for row in rows])
        return forward_batch(rows)

    forward_batch = pipe._forward_batch
    monkeypatch.setattr(pipe, "_forward_batch", record_lengths)
    together = pipe(texts)
    flat = [length for batch in lengths for length in batch]
    assert flat == sorted(flat, reverse=True)
    assert [len(batch) for batch in lengths] == [2, 2, 2, 1]
    for text, answer in zip(texts, together, strict=True):
        alone = pipe(text)
        assert same(answer, alone[0] if task == "sentiment-analysis" else alone)


def test_a_model_in_training_mode_answers_in_evaluation_mode(make, models):
    model = models["roberta", "sentiment-analysis"]
    before = make("roberta", "sentiment-analysis")(maker.TEXTS)
    model.train()
    assert same(make("roberta", "sentiment-analysis")(maker.TEXTS), before)


def test_a_regressors_score(tokenizers):
    model = maker.build_model("roberta", "sentiment-analysis", id2label={0: "score"})
    (answer,) = pipeline("text-classification", model, tokenizer=tokenizers["roberta"])("a film")
    with torch.no_grad():
        logit = model(**tokenizers["roberta"]("a film", return_tensors="pt")).logits
    assert answer == {"label": "score", "score": pytest.approx(float(logit.sigmoid()))}


# ---- models ----


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("task", maker.TASKS)
def test_a_saved_pipeline_gives_the_same_answers(tokenizers, models, tmp_path, family, task):
    pipe = pipeline(task, models[family, task], tokenizer=tokenizers[family])
    pipe.save_pretrained(tmp_path)
    opened = pipeline(task, str(tmp_path))
    name = {"sentiment-analysis": "texts", "ner": "entities", "fill-mask": "mask"}.get(task)
    name = name or "answers"
    ours = maker.answer(name, opened.model, opened.tokenizer)
    assert same(ours, maker.answer(name, pipe.model, pipe.tokenizer))
    assert (opened.framework, opened.device, opened.task) == ("pt", torch.device("cpu"), task)


def test_question_answering_opens_a_fast_tokenizer(make, tmp_path):
    make("roberta", "question-answering").save_pretrained(tmp_path)
    assert pipeline("question-answering", tmp_path, use_fast=False).tokenizer.is_fast


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_are_in_effect(tokenizers, family):
    """The scores are those of the given model's logits, with LoRA."""
    model = maker.build_model(family, "ner", **settings_of(["lora"]))
    answers = pipeline("ner", model, tokenizer=tokenizers[family], ignore_labels=[])("a song")
    with torch.no_grad():
        logits = model(**tokenizers[family]("a song", return_tensors="pt")).logits[0]
    expected = logits.softmax(-1).max(-1).values[1:-1].tolist()
    assert [answer["score"] for answer in answers] == pytest.approx(expected, rel=1e-4)
    plain = pipeline("ner", maker.build_model(family, "ner"), tokenizer=tokenizers[family])
    assert plain("a song") != answers


@pytest.mark.parametrize("family", FAMILIES)
def test_each_text_with_an_adapter_of_its_own(tokenizers, family):
    """A bank's adapters are listed in the order of the texts, not of their lengths."""
    base_model = maker.build_model(family, "sentiment-analysis")
    bank = AdapterBank(base_model)
    for seed, name in enumerate("ab"):
        adapted = maker.build_model(family, "sentiment-analysis", **settings_of(["lora"]))
        torch.manual_seed(seed)
        for parameter_name, parameter in adapted.named_parameters():
            if "lora_" in parameter_name:
                parameter.data.normal_()
        bank.add(name, adapted.adapter())
    classify = pipeline("sentiment-analysis", base_model, tokenizer=tokenizers[family])
    alone = []
    for text, name in zip(maker.TEXTS, "abba", strict=True):
        with bank.use(name):
            alone += classify(text)
    with bank.use(list("abba")):
        assert same(classify(maker.TEXTS), alone)
    assert not same(classify(maker.TEXTS), alone)


def test_unknown_tasks_and_missing_arguments_are_refused(models):
    with pytest.raises(KeyError, match="no pipeline for 'summarization' here"):
        pipeline("summarization")
    with pytest.raises(ValueError, match="needs a model"):
        pipeline("ner")
    model = models["roberta", "ner"]
    with pytest.raises(ValueError, match="give tokenizer="):
        pipeline("ner", model)
    with pytest.raises(ValueError, match="framework='tf'"):
        pipeline("ner", model, framework="tf")


def test_a_model_with_another_head_is_refused(models, tokenizers):
    model = models["roberta", "question-answering"]
    with pytest.raises(PipelineException, match="RobertaForQuestionAnswering has no head for"):
        TokenClassificationPipeline(model, tokenizers["roberta"])
