"""Fine-tune RoBERTa or DeBERTa-v2, with LoRA or without, to answer questions from texts.

    python examples/question-answering/run_qa.py --model_name_or_path roberta-base \
        --dataset_name squad --do_train --do_eval \
        --apply_lora --lora_r 8 --lora_alpha 16 --learning_rate 5e-4 --output_dir squad

Files are SQuAD's own, or have one question per line, whose answers are parts of the context:

    {"id": "1", "question": "Who?", "context": "Ann ran.", "answers": {"text": ["Ann"],
     "answer_start": [0]}}

Texts longer than --max_seq_length are read in parts that overlap by --doc_stride tokens. Answers go
to eval_predictions.json and test_predictions.json, and the n best of each question to files next to
them. The flags for models and adapters, the training and the other output files are those of
run_glue.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    from loralib.training.process import begin

    begin()

import numpy as np

from loralib.adapters.adapter import Adapter
from loralib.training.watch import beat
from transformers import (
    AutoModelForQuestionAnswering,
    DataCollatorWithPadding,
    EvalPrediction,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.data.question_answering import EXAMPLE, OFFSETS, Answer, answers_of, rows_of
from transformers.fine_tuning.adapted_model import (
    build_model,
    load_config,
    load_task_config,
    open_tokenizer,
)
from transformers.fine_tuning.arguments import AdaptedModelArguments, HubDataArguments
from transformers.fine_tuning.data_sets import load_tables
from transformers.fine_tuning.lengths import choose_length
from transformers.fine_tuning.questions import (
    Question,
    check_questions,
    check_room,
    names_of_scores,
    read_questions,
    scores_of,
    write_answers,
)
from transformers.fine_tuning.script import (
    Prepared,
    check_scores,
    estimate_task,
    needed_splits,
    open_run,
    report,
    start,
    train,
)
from transformers.hf_argparser import flag
from transformers.utils.cli import run_script

if TYPE_CHECKING:  # imported where data is read, so that --help and wrong flags answer at once
    from datasets import Dataset

# The default numbers of tokens in a row, and of those that a row shares with the next one.
USUAL_LENGTH, USUAL_STRIDE = 384, 128
POSITIONS = ["start_positions", "end_positions"]


@dataclass
class DataTrainingArguments(HubDataArguments):
    """The flags for the data and for what counts as an answer."""

    max_seq_length: int | None = flag(
        None,
        "tokens of a question and a part of its text (default: 384, or as many as the model takes)",
        least=1,
    )
    doc_stride: int | None = flag(
        None,
        "tokens shared by consecutive parts of a long text (default: 128, or a third of "
        "max_seq_length)",
    )
    version_2_with_negative: bool = flag(False, "questions may have no answer, as in SQuAD 2.0")
    null_score_diff_threshold: float = flag(
        0.0,
        "a question gets no answer if having none scores higher than its best answer by more than "
        "this; best_f1_thresh of an evaluation is the best threshold that is not above its own (0 "
        "if it is best to answer nothing at all): evaluate with a high one to find it",
    )
    n_best_size: int = flag(
        20,
        "answers of a question to keep and to write; also how many starts and ends of each part "
        "of its text are considered for them",
        least=1,
    )
    max_answer_length: int = flag(30, "the most tokens of an answer", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.null_score_diff_threshold != 0 and not self.version_2_with_negative:
            raise ValueError("--null_score_diff_threshold needs --version_2_with_negative")


# ------------------------------------------------------------------------------------------------
# Data
# ------------------------------------------------------------------------------------------------


@dataclass
class PreparedQuestions(Prepared):
    """The settings and the data from which a run's model is made and trained.

    Args:
        questions: the questions by split.
        parts: by split, the number of each row's question, and where its tokens are in the text.
    """

    questions: dict[str, list[Question]]
    parts: dict[str, Dataset]


def prepare(
    model_args: AdaptedModelArguments,
    data_args: DataTrainingArguments,
    args: TrainingArguments,
    adapters: Sequence[Adapter],
    splits: Sequence[str],
) -> PreparedQuestions:
    """Reads settings, data and tokenizer, and checks that they fit together."""
    if args.label_smoothing_factor:
        raise ValueError(
            "--label_smoothing_factor smooths a single label, but an answer has two, its start "
            "and its end: leave it out"
        )
    check_scores(args, names_of_scores(data_args.version_2_with_negative))
    config = load_task_config(model_args, args, adapters)
    tables = load_tables(data_args, splits, model_args.cache_dir, read_questions)
    questions = check_questions(tables, data_args.version_2_with_negative)
    tokenizer = open_tokenizer(model_args, config, aligned=True, padding_side="right")
    choose_rows(data_args, config, tokenizer)
    for table in tables.values():
        check_room(table, tokenizer, data_args.max_seq_length, data_args.doc_stride)
    rows = {split: tokenize(split, questions[split], tokenizer, data_args) for split in splits}
    return PreparedQuestions(
        load_config(model_args, num_labels=2, finetuning_task=None, text_columns=None),
        tokenizer,
        {split: each.remove_columns([EXAMPLE, OFFSETS]) for split, each in rows.items()},
        DataCollatorWithPadding(tokenizer),
        questions,
        {split: each.select_columns([EXAMPLE, OFFSETS]) for split, each in rows.items()},
    )


def choose_rows(
    data_args: DataTrainingArguments, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Sets --max_seq_length and --doc_stride to values that fit the model, unless they were given.

    Raises:
        ValueError: the given values do not fit the model or each other.
    """
    data_args.max_seq_length = length = choose_length(
        data_args.max_seq_length, config, tokenizer, is_pair=True, usual=USUAL_LENGTH
    )
    if data_args.doc_stride is None:
        data_args.doc_stride = min(USUAL_STRIDE, length // 3)
    if not 0 <= data_args.doc_stride < length:
        raise ValueError(
            f"--doc_stride must be at least 0 and below --max_seq_length {length}, not "
            f"{data_args.doc_stride}"
        )


def tokenize(
    split: str,
    questions: Sequence[Question],
    tokenizer: PreTrainedTokenizerBase,
    data_args: DataTrainingArguments,
) -> Dataset:
    """Returns a split's rows, one or several per question, with each token's place in the text."""
    from datasets import Dataset

    # `encode` must refer only to what changes its results, as the cache's key covers all of that.
    length, stride = data_args.max_seq_length, data_args.doc_stride
    padded, with_answers = data_args.pad_to_max_length, split != "test"

    def encode(rows: dict[str, list], numbers: list[int]) -> dict[str, list]:
        beat()
        texts = (rows["question"], rows["context"])
        spans = rows["span"] if with_answers else None
        encoded = rows_of(tokenizer, *texts, spans, length, stride, padded)
        encoded[EXAMPLE] = [numbers[example] for example in encoded[EXAMPLE]]
        return encoded

    columns = {
        "question": [question.question for question in questions],
        "context": [question.context for question in questions],
        "span": [question.span for question in questions],
    }
    return Dataset.from_dict(columns).map(
        encode,
        batched=True,
        with_indices=True,
        remove_columns=list(columns),
        load_from_cache_file=not data_args.overwrite_cache,
        num_proc=data_args.preprocessing_num_workers,
        desc=f"tokenizing {split}",
    )


# ------------------------------------------------------------------------------------------------
# Run
# ------------------------------------------------------------------------------------------------


def answer(
    logits: tuple[np.ndarray, np.ndarray],
    prepared: PreparedQuestions,
    split: str,
    data_args: DataTrainingArguments,
) -> list[Answer]:
    """Returns the answers to a split's questions."""
    parts = prepared.parts[split]
    return answers_of(
        [question.context for question in prepared.questions[split]],
        parts[EXAMPLE][:],
        parts[OFFSETS],
        *logits,
        n_best_size=data_args.n_best_size,
        max_answer_length=data_args.max_answer_length,
        may_be_none=data_args.version_2_with_negative,
        null_score_diff_threshold=data_args.null_score_diff_threshold,
    )


@dataclass
class Scorer:
    """Computes SQuAD's scores of the validation set.

    Args:
        prepared, data_args: the questions, and the flags for what counts as an answer.
        answers: the answers of the last evaluation.
    """

    prepared: PreparedQuestions
    data_args: DataTrainingArguments
    answers: list[Answer] = field(default_factory=list)

    def __call__(self, evaluated: EvalPrediction) -> dict[str, float]:
        """Returns the scores of an evaluation, and keeps its answers."""
        questions = self.prepared.questions["validation"]
        self.answers = answer(evaluated.predictions, self.prepared, "validation", self.data_args)
        return scores_of(questions, self.answers, self.data_args.version_2_with_negative)


def evaluate(trainer: Trainer, scorer: Scorer) -> None:
    """Evaluates on the validation set, and writes the scores and the answers.

    Evaluations during training write no answers. If they did, a run killed before its first
    checkpoint would leave files behind, and could not be started again in that folder.
    """
    questions = scorer.prepared.questions["validation"]
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero() and scorer.answers:
        write_answers(trainer.args.output_dir, "eval", questions, scorer.answers)
    report(trainer, "eval", metrics, questions)


def predict(
    trainer: Trainer, prepared: PreparedQuestions, data_args: DataTrainingArguments
) -> None:
    """Writes the answers to the test set's questions and, if it has answers, the scores."""
    questions = prepared.questions["test"]
    output = trainer.predict(prepared.datasets["test"], metric_key_prefix="test")
    answers = answer(output.predictions, prepared, "test", data_args)
    if trainer.is_world_process_zero():
        write_answers(trainer.args.output_dir, "test", questions, answers)
    may_have_none = data_args.version_2_with_negative
    known = [bool(question.answers) for question in questions]
    if all(known) or (any(known) and may_have_none):
        scores = scores_of(questions, answers, may_have_none)
        output.metrics.update({f"test_{name}": score for name, score in scores.items()})
    report(trainer, "test", output.metrics, questions)


def fine_tune(
    model_args: AdaptedModelArguments, data_args: DataTrainingArguments, args: TrainingArguments
) -> None:
    """Loads the model and the data, then trains, evaluates and predicts as the flags ask for."""
    checkpoint, adapters = open_run(model_args, args, AutoModelForQuestionAnswering.role)
    args.label_names = POSITIONS
    prepared = prepare(model_args, data_args, args, adapters, needed_splits(args))
    set_seed(args.seed)
    model = build_model(AutoModelForQuestionAnswering, model_args, prepared.config, adapters, args)
    scorer = Scorer(prepared, data_args)
    trainer = prepared.trainer(model, args, scorer)
    if args.do_train:
        train(trainer, checkpoint)
    if args.do_eval:
        evaluate(trainer, scorer)
    if args.do_predict:
        predict(trainer, prepared, data_args)
    trainer.log_end()


def estimate(*flags: Any) -> None:
    """Prints an estimate of what training takes."""

    def example(length: int) -> dict[str, Any]:
        ones = [1] * length
        return {"input_ids": ones, "attention_mask": ones, **dict.fromkeys(POSITIONS, 0)}

    estimate_task(AutoModelForQuestionAnswering, *flags, prepare, example)


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, and runs what it asks for."""
    start(argv, __doc__, (AdaptedModelArguments, DataTrainingArguments), fine_tune, estimate)


if __name__ == "__main__":
    run_script(main)
