"""Tests gpt2_ft.py: what it writes and when, the flags that it accepts, and its errors."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from launches import fork_server

import gpt2_ft
import metrics_log
from gpt2_ft_arguments import parse_args
from loralib.adapters.metadata import LoraMetadata
from loralib.io.tensors import read_tensors
from loralib.training import curves
from loralib.training.curves import CURVES_NAME, HOW_TO_GET_IT

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(gpt2_ft.__file__)
FLAGS_OF_THE_RELEASE = ROOT.parent / "shared" / "facts" / "nlg_cli.json"


def models_of(work_dir: Path) -> dict[int, dict[str, torch.Tensor]]:
    """Returns the tensors of each ``model.<step>.pt``, by step."""
    paths = {int(path.name.split(".")[1]): path for path in work_dir.glob("model.*.pt")}
    return {step: read_tensors(paths[step])[0] for step in sorted(paths)}


def is_lora_only(tensors: dict[str, torch.Tensor]) -> bool:
    return all("lora_" in name for name in tensors)


# ---- what is written ----


@pytest.mark.parametrize("more", ["", "--save_lora_only", "--bf16"])
def test_checkpoints_of_lora(tiny, tmp_path, more):
    """They are written every three steps, and after each epoch of four steps."""
    argv = tiny.flags(tmp_path, *f"--max_epoch 2 --save_interval 3 --lr 0.03 {more}".split())
    argv[argv.index("--init_checkpoint") + 1] = str(tiny.base)
    gpt2_ft.main(argv)
    models = models_of(tmp_path)
    assert list(models) == [3, 4, 6, 8]
    assert all(is_lora_only(models[step]) for step in (3, 4, 6))
    lora = {f"module.transformer.h.{n}.attn.c_attn.lora_{ab}" for n in (0, 1) for ab in "AB"}
    assert models[3].keys() == lora
    assert not any(torch.equal(models[4][name], models[8][name]) for name in lora)
    base = read_tensors(tiny.base)[0]
    if more == "--save_lora_only":
        base = {}
    assert models[8].keys() == lora | base.keys()
    assert all(torch.equal(models[8][name], tensor) for name, tensor in base.items())
    assert {t.dtype for tensors in models.values() for t in tensors.values()} == {torch.float32}


def test_checkpoints_of_the_whole_model(tiny, tmp_path):
    more = "--max_step 5 --max_epoch 2 --save_interval 2 --lr 0.003 --bf16"
    gpt2_ft.main(tiny.flags(tmp_path, *more.split(), lora=False))
    models, base = models_of(tmp_path), read_tensors(tiny.base)[0]
    assert list(models) == [2, 4, 5]
    for tensors in models.values():
        assert tensors.keys() == base.keys()
        assert not any(torch.equal(tensors[name], base[name]) for name in base)


@pytest.mark.parametrize("more", ["--max_step 6 --max_epoch 1", "--max_epoch 1"])
def test_the_first_limit_ends_the_run(tiny, tmp_path, read_metrics, more):
    gpt2_ft.main(tiny.flags(tmp_path, *more.split()))
    assert list(models_of(tmp_path)) == [4]
    assert len(read_metrics(tmp_path)[0]) == 4


def test_an_incomplete_accumulation_at_the_end_is_dropped(tiny, tmp_path):
    for steps in (6, 8):
        more = f"--max_step {steps} --grad_acc 3 --lr 0.03 --scheduler constant"
        gpt2_ft.main(tiny.flags(tmp_path / str(steps), *more.split()))
    six, eight = (models_of(tmp_path / str(steps))[steps] for steps in (6, 8))
    assert all(torch.equal(tensor, eight[name]) for name, tensor in six.items())


def test_a_checkpoint_has_metadata(tiny, tmp_path):
    gpt2_ft.main(tiny.flags(tmp_path, "--max_step", 4, "--save_interval", 2))
    for step in (2, 4):
        path = tmp_path / f"model.{step}.pt"
        info = LoraMetadata.from_metadata(read_tensors(path)[1], path)
        assert (info.rank, info.alpha, info.targets) == (2, 8, ("c_attn",))
        assert info.base == str(tiny.base_with_lora)
        assert len(info.base_fingerprint) == 32
    content = torch.load(tmp_path / "model.4.pt", weights_only=True)
    assert "model_state_dict" in content


def test_training_continues_from_a_models_file(tiny, tmp_path):
    """The file records the rank, so --lora_dim is not given."""
    gpt2_ft.main(tiny.flags(tmp_path / "first", "--max_step", 2))
    more = ["--max_step", 2, "--init_checkpoint", tmp_path / "first" / "model.2.pt"]
    gpt2_ft.main(tiny.flags(tmp_path / "next", "--save_interval", 1, *more, lora=False))
    assert is_lora_only(models_of(tmp_path / "next")[1])


def test_new_lora_weights_change_nothing_at_first(tiny, tmp_path, read_metrics):
    for name, rank in (("with", 4), ("without", 0)):
        more = ["--lora_dim", rank, "--max_step", 1]
        gpt2_ft.main(tiny.flags(tmp_path / name, *more, lora=False))
    (first, _), (second, _) = (read_metrics(tmp_path / name) for name in ("with", "without"))
    assert first[0]["loss"] == second[0]["loss"]


def test_metrics_are_written_at_their_intervals(tiny, tmp_path, read_metrics):
    more = "--max_step 7 --log_interval 3 --eval_interval 2"
    gpt2_ft.main(tiny.flags(tmp_path, *more.split()))
    steps, evaluations = read_metrics(tmp_path)
    assert [row["step"] for row in steps] == [3, 6]
    assert [row["step"] for row in evaluations] == [2, 4, 6]
    assert set(steps[0]) == {"step", "loss", "lr", "tokens_per_second"}
    assert set(evaluations[0]) == {"step", "valid_loss", "valid_ppl", "best_ppl"}


@pytest.fixture
def drawn(monkeypatch):
    """A list of the panels of each picture that is drawn; matplotlib counts as available."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(metrics_log, "is_matplotlib_available", lambda: True)
    pictures, draw = [], curves._draw

    def note(panels):
        pictures.append(panels)
        return draw(panels)

    monkeypatch.setattr(curves, "_draw", note)
    return pictures


def test_no_metrics_are_lost_in_a_power_cut(tiny, tmp_path, monkeypatch):
    """They are synced before each state, after which a resumed run adds only later lines."""
    log, synced, seen = tmp_path / "metrics.jsonl", [], []
    fsync = os.fsync

    def noting(handle):
        if log.exists() and os.path.samestat(os.fstat(handle), log.stat()):
            synced.append(log.stat().st_size)
        fsync(handle)

    def spied(write):
        def writing(*given):
            seen.append((synced[-1:], [log.stat().st_size]))
            write(*given)

        return writing

    for name in ("write_run", "write_finished"):
        monkeypatch.setattr(gpt2_ft, name, spied(getattr(gpt2_ft, name)))
    monkeypatch.setattr(os, "fsync", noting)
    gpt2_ft.main(
        tiny.flags(tmp_path, *["--max_epoch", "2", "--save_interval", "3", "--report_to", "none"])
    )
    assert len(seen) > 2
    assert all(length == size for length, size in seen)


def test_a_run_is_drawn_at_its_end(tiny, tmp_path, drawn, read_metrics):
    gpt2_ft.main(tiny.flags(tmp_path, "--max_step", 4, "--eval_interval", 2))
    steps, evaluations = read_metrics(tmp_path)

    def line(rows, name):
        return {row["step"]: row[name] for row in rows}

    assert drawn == [
        {
            "loss": {
                "training": line(steps, "loss"),
                "validation": line(evaluations, "valid_loss"),
            },
            "learning rate": {"learning rate": line(steps, "lr")},
            "perplexity": {
                "validation": line(evaluations, "valid_ppl"),
                "the best so far": line(evaluations, "best_ppl"),
            },
        }
    ]
    assert (tmp_path / CURVES_NAME).read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "runs").exists()  # TensorBoard is not available


def test_a_resumed_run_is_drawn_as_a_whole(tiny, tmp_path, drawn, monkeypatch):
    argv = tiny.flags(tmp_path, "--max_step", 8, "--save_interval", 3)
    write_run = gpt2_ft.write_run

    def write_and_end(*state):
        write_run(*state)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gpt2_ft, "write_run", write_and_end)
        with pytest.raises(KeyboardInterrupt):
            gpt2_ft.main(argv)
    assert not drawn
    gpt2_ft.main([*argv, "--resume"])
    (panels,) = drawn
    assert list(panels["loss"]["training"]) == [*range(1, 9)]


def test_a_run_killed_at_its_picture_is_drawn_when_it_resumes(tiny, tmp_path, drawn, monkeypatch):
    argv = tiny.flags(tmp_path, "--max_step", 6, "--save_interval", 3)
    with monkeypatch.context() as patch:
        patch.setattr(curves, "_draw", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            gpt2_ft.main(argv)
    assert not (tmp_path / CURVES_NAME).exists()
    gpt2_ft.main([*argv, "--resume"])
    assert (tmp_path / CURVES_NAME).exists()
    assert list(drawn[0]["loss"]["training"]) == [*range(1, 7)]


@pytest.mark.parametrize("report_to", ["none", "tensorboard", "plot"])
def test_report_to_chooses_where_metrics_go(tiny, tmp_path, drawn, report_to):
    argv = tiny.flags(tmp_path / "run", "--max_step", 1, "--report_to", report_to)
    if report_to == "tensorboard":
        with pytest.raises(ValueError, match="report_to tensorboard: it is not installed"):
            parse_args(argv)
        return
    gpt2_ft.main(argv)
    assert len(drawn) == (report_to == "plot")


def test_report_to_none_excludes_others(tiny, tmp_path):
    argv = tiny.flags(tmp_path / "run", "--report_to", "none", "plot")
    with pytest.raises(ValueError, match=r"report_to none: leave it out, or plot$"):
        parse_args(argv)


@pytest.mark.parametrize(("asked", "level"), [("plot", "WARNING"), ("all", "INFO")])
def test_a_missing_matplotlib_is_logged_once(tiny, tmp_path, caplog, asked, level):
    gpt2_ft.main(tiny.flags(tmp_path, "--max_step", 1, "--report_to", asked))
    levels = [r.levelname for r in caplog.records if r.getMessage() == HOW_TO_GET_IT]
    assert levels == [level]
    assert (tmp_path / "model.1.pt").is_file()
    assert not (tmp_path / CURVES_NAME).exists()


def test_a_run_logs_its_settings_steps_and_results(tiny, tmp_path, caplog):
    gpt2_ft.main(tiny.flags(tmp_path, "--max_step", 2, "--eval_interval", 2))
    before, *steps, evaluated, wrote, after = (
        record.getMessage()
        for record in caplog.records
        if record.levelname == "INFO" and record.getMessage() != HOW_TO_GET_IT
    )
    assert before.startswith("training\n  model          gpt2.xs, ")
    assert "  adapted by     LoRA of rank 2, alpha 8, in 2 modules: c_attn\n" in before
    assert "  training set   14 examples\n" in before
    assert "  steps          2 of 4 examples each\n  learning rate  1e-05\n" in before
    assert [text.partition(",")[0][:12] for text in steps] == ["step 1 of 2:", "step 2 of 2:"]
    assert steps[0].endswith(" left")
    assert evaluated.startswith("step 2 of 2: valid_loss ")
    assert wrote == f"wrote {tmp_path / 'model.2.pt'}"
    assert after.startswith("finished\n  trained  ")
    assert f"  model    {tmp_path / 'model.2.pt'}" in after
    assert "; 2 steps in " in after


@pytest.mark.parametrize(
    ("ends", "objective", "without"),
    [
        ("none", "clm", "{train}, {valid}"),
        ("train", "clm", "{valid}"),
        ("some", "clm", "{train}"),
        ("all", "clm", None),
        ("none", "jlm", None),
    ],
)
def test_completions_without_an_end_are_warned_of(tiny, tmp_path, caplog, ends, objective, without):
    """gpt2_encode.py writes such completions without --add_eos."""
    argv = tiny.flags(tmp_path / "run", "--max_step", 1, "--obj", objective)
    paths = {name: tmp_path / f"{name}.jsonl" for name in ("train", "valid")}
    for name, path in paths.items():
        rows = [{"context": [1, 22], "completion": [2, 3, n, 2]} for n in range(4, 9)]
        has_end = {"train": name == "train", "some": name == "valid"}.get(ends, ends == "all")
        for row in rows if has_end else rows[:2] if ends == "some" else []:
            row["completion"].append(22)
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        argv[argv.index(f"--{name}_data") + 1] = str(path)
    gpt2_ft.main(argv)
    warned = [text for text in caplog.messages if "completions do not all end in one" in text]
    if without is None:
        assert warned == []
    else:
        (text,) = warned
        assert text.startswith(f"{without.format(**paths)}: ")
        assert text.endswith(": encode them with gpt2_encode.py --add_eos")


def test_log_level_error_hides_everything_else(tiny, tmp_path, caplog):
    argv = tiny.flags(tmp_path, "--max_step", 1, "--log_level", "error", "--report_to", "plot")
    gpt2_ft.main(argv)
    assert not caplog.messages


def test_tensorboard_has_the_same_figures(tiny, tmp_path, monkeypatch, read_metrics):
    monkeypatch.delitem(sys.modules, "tensorboard")
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    gpt2_ft.main(tiny.flags(tmp_path, "--max_step", 4, "--eval_interval", 2))
    events = reader.EventAccumulator(str(tmp_path / "runs")).Reload()
    for rows in read_metrics(tmp_path):
        for name in rows[0].keys() - {"step"}:
            shown = [(event.step, event.value) for event in events.Scalars(name)]
            assert shown == [(row["step"], pytest.approx(row[name], rel=1e-6)) for row in rows]


# ---- flags ----


def parse(*words: object) -> dict:
    needed = ["--train_data", "a", "--valid_data", "b"]
    return vars(gpt2_ft.parse_args([*needed, *map(str, words)]))


@pytest.fixture(scope="module")
def release_flags():
    if not FLAGS_OF_THE_RELEASE.is_file():
        pytest.skip(f"{FLAGS_OF_THE_RELEASE.name}, the list of the release's flags, is not here")
    return json.loads(FLAGS_OF_THE_RELEASE.read_text())["gpt2_ft.py"]


def test_all_flags_of_the_release_are_accepted(release_flags):
    assert len(release_flags) == 42
    samples = {"int": 3, "float": 0.25, "str": "text", None: "text"}
    for entry in release_flags:
        flag, name = entry["flag"], entry["flag"].removeprefix("--")
        if entry.get("action") == "store_true":
            assert parse()[name] is False
            assert parse(flag)[name] is True
            continue
        # Only platforms and schedulers that are implemented are accepted.
        values = {"platform": ["local", "philly", "k8s", "azure"]}.get(name)
        values = values or entry.get("choices") or [samples[entry.get("type")]]
        for value in set(values) - {"inv_sqrt", "dev_perf"}:
            assert parse(flag, value)[name] == value
            assert parse(f"{flag}={value}")[name] == value


def test_defaults_are_the_releases(release_flags, monkeypatch):
    monkeypatch.delenv("PT_OUTPUT_DIR", raising=False)
    given = {entry["flag"].removeprefix("--"): entry.get("default") for entry in release_flags}
    given |= {"train_data": "a", "valid_data": "b", "work_dir": "gpt2_model"}
    given |= {"fp16": False, "correct_bias": False, "no_decay_bias": False}
    # If they are not given, those of the file are used, else the release's: see the next test.
    assert (given.pop("lora_dim"), given.pop("lora_alpha")) == (0, 128)
    # If it is not given, it is 0 for one process, as in the release. Several need one each.
    assert given.pop("local_rank") == 0
    defaults = parse()
    assert {name: defaults[name] for name in given} == given
    monkeypatch.setenv("PT_OUTPUT_DIR", "elsewhere")
    assert parse()["work_dir"] == "elsewhere"


def test_alpha_is_128_by_default(tiny, tmp_path):
    flags = ["--lora_dim", 2, "--max_step", 1, "--save_lora_only"]
    gpt2_ft.main(tiny.flags(tmp_path, *flags, lora=False))
    path = tmp_path / "model.1.pt"
    assert LoraMetadata.from_metadata(read_tensors(path)[1], path).alpha == 128


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--scheduler inv_sqrt", "invalid choice: 'inv_sqrt'"),
        ("--scheduler quick", "invalid choice: 'quick'"),
        ("--obj mlm", "invalid choice: 'mlm'"),
        ("--model_card gpt3", "invalid choice: 'gpt3'"),
        ("--max_step many", "invalid int value: 'many'"),
        ("--fp16 --bf16", "not allowed with argument --fp16"),
        ("--learning_rate 1", "unrecognized arguments"),
    ],
)
def test_a_wrong_command_line(tiny, tmp_path, capsys, more, message):
    with pytest.raises(SystemExit) as end:
        gpt2_ft.main(tiny.flags(tmp_path / "run", *more.split()))
    assert end.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "run").exists()


# ---- bad input ----


@pytest.fixture
def finished(tiny, tmp_path, files_of):
    """The folder of a finished run, which the test must not change."""
    work_dir = tmp_path / "run"
    gpt2_ft.main(tiny.flags(work_dir, "--max_step", 2))
    before = files_of(work_dir)
    yield work_dir
    assert files_of(work_dir) == before


@pytest.mark.parametrize("flag", ["--train_data", "--valid_data"])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"context": [1, 2', "not JSON"),
        ('{"context": [1, 2]}', 'has no "completion"'),
        ('{"context": [1], "completion": []}', "the completion is empty"),
        ('{"context": [1], "completion": [50257]}', "outside the vocabulary of 50257"),
        ('{"context": [-1], "completion": [5]}', "outside the vocabulary of 50257"),
    ],
)
def test_a_bad_line_is_named(tiny, finished, tmp_path, error_of, flag, line, message):
    rows = (tiny.folder / "train.jsonl").read_text().splitlines()
    rows[2] = line
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(rows))
    error = error_of(tiny.flags(finished, "--max_step", 4, flag, path))
    assert f"{path}:3: " in error
    assert message in error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("name : Blue||Blue is\n", ":1: not JSON ("),
        ("[\n{}]", ":1: not JSON ("),
        ("", ": is empty"),
    ],
)
def test_texts_instead_of_token_ids(tiny, finished, tmp_path, error_of, content, message):
    path = tmp_path / "texts"
    path.write_text(content)
    error = error_of(tiny.flags(finished, "--max_step", 4, "--train_data", path))
    assert f"{path}{message}" in error
    assert "; token ids are needed: format_converting_e2e.py (_webnlg, _dart) and then" in error


def test_formatted_texts_instead_of_token_ids(tiny, finished, tmp_path, error_of):
    path = tmp_path / "texts"
    path.write_text('{"context": "a", "completion": "b"}')
    error = error_of(tiny.flags(finished, "--max_step", 4, "--valid_data", path))
    assert f"{path}:1: holds texts, not token ids: gpt2_encode.py makes these from it" in error


def test_a_folder_instead_of_a_data_file(tiny, finished, tmp_path, error_of):
    error = error_of(tiny.flags(finished, "--max_step", 4, "--valid_data", tmp_path))
    assert f"{tmp_path}: is a folder; give a file of it, such as train.jsonl" in error


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("", "give the length of the training: --max_step or --max_epoch"),
        ("--max_step 0", "--max_step must be at least 1, not 0"),
        ("--grad_acc 0", "--grad_acc must be at least 1"),
        ("--save_interval 0", "--save_interval must be at least 1"),
        ("--eval_interval -1", "--eval_interval must be at least 1"),
        ("--log_interval 0", "--log_interval must be at least 1"),
        ("--max_step 4 --max_epoch 0", "--max_epoch must be at least 1, not 0"),
        ("--max_step 4 --label_smooth 7", "--label_smooth must lie in [0, 1), not 7"),
        ("--max_step 4 --clip nan", "--clip must be at least 0, not nan"),
        ("--max_step 4 --lora_alpha inf", "--lora_alpha must be finite, not inf"),
        (
            "--max_step 4 --random_seed -1",
            "--random_seed must lie in [0, 4611686018427387904], not -1",
        ),
        ("--max_step 4 --warmup_step -1", "--warmup_step must be at least 0"),
        (
            "--scheduler cycle --i_steps 0,5,9 --i_lrs 0.1,0.2",
            "--i_steps has 3 numbers and --i_lrs has 2: each step needs its rate",
        ),
        ("--scheduler cycle --i_steps 0,5 --i_lrs 0.1,x", "not numbers separated by commas"),
        ("--max_step 4 --lr nan", "--lr must be at least 0, not nan"),
        ("--max_step 4 --weight_decay -1", "--weight_decay must be at least 0, not -1"),
        ("--max_step 4 --adam_epislon -1", "--adam_epislon must be at least 0, not -1"),
        (
            "--max_step 4 --adam_beta1 1",
            "--adam_beta1 must lie in [0, 1), not 1",
        ),
        (
            "--max_step 4 --adam_beta2 nan",
            "--adam_beta2 must lie in [0, 1), not",
        ),
        ("--max_step 4 --seq_len 33", "--seq_len 33: the model has 32 positions"),
        ("--max_step 4 --train_batch_size 0", "--train_batch_size must be at least 1, not 0"),
        ("--max_step 4 --valid_batch_size 0", "--valid_batch_size must be at least 1, not 0"),
        ("--max_step 4 --seq_len 0", "--seq_len must be at least 1, not 0"),
        ("--max_step 4 --lora_dropout 1.5", "dropout"),
        ("--max_step 4 --lora_dim -1", "--lora_dim"),
        ("--max_step 4 --lora_dim 3", "rank 2, but --lora_dim is 3"),
        ("--max_step 4 --lora_alpha 4", "alpha 8, but --lora_alpha is 4"),
        ("--max_step 4 --train_data {folder}/none.jsonl", "none.jsonl"),
        ("--max_step 4 --init_checkpoint {folder}/none.pt", "none.pt: no such checkpoint file"),
        ("--max_step 4 --init_checkpoint {folder}/train.jsonl", "train.jsonl: damaged"),
        ("--max_step 4 --ddp_timeout 0", "--ddp_timeout must be above 0, not 0.0"),
        ("--max_step 4 --world_size 2", "--world_size is 2, but the launcher started 1"),
    ],
)
def test_invalid_settings_are_refused(tiny, finished, error_of, more, message):
    more = more.format(folder=tiny.folder)
    assert message in error_of(tiny.flags(finished, *more.split()))


@pytest.mark.parametrize(
    "more",
    [
        *("--lr -1", "--lr inf", "--weight_decay -1e-3", "--adam_epislon nan", "--adam_beta1 1"),
        *("--adam_beta2 -0.5", "--warmup_step -1", "--lora_dim -1", "--lora_alpha -2"),
    ],
)
def test_numbers_are_checked_before_files_are_read(error_of, more):
    flag, value = more.split()
    error = error_of(["--train_data", "none", "--valid_data", "none", flag, value])
    assert f"{flag} must " in error


def test_fp16_needs_a_gpu(tiny, finished, error_of):
    argv = tiny.flags(finished, "--max_step", 4, "--fp16")
    assert "fp16 needs a GPU: use bf16, which works on a CPU as well" in error_of(argv)


def test_lora_needs_a_base(tiny, finished, error_of):
    argv = tiny.flags(finished, "--max_step", 4)
    del argv[(at := argv.index("--init_checkpoint")) : at + 2]
    message = "--lora_dim needs a trained base: give it as --init_checkpoint"
    assert message in error_of(argv)


def test_flags_that_need_lora(tiny, finished, error_of):
    argv = tiny.flags(finished, "--max_step", 4, "--save_lora_only", lora=False)
    assert "--save_lora_only needs LoRA: add --lora_dim" in error_of(argv)
    argv = tiny.flags(finished, "--max_step", 4, "--lora_dropout", 0.1, lora=False)
    assert "--lora_dropout needs LoRA: add --lora_dim" in error_of(argv)


def _narrow(tensors):
    name = "module.transformer.h.0.mlp.c_fc.weight"
    return {**tensors, name: tensors[name][:, :8]}


def _shallow(tensors):
    return {name: tensor for name, tensor in tensors.items() if ".h.1." not in name}


def _deep(tensors):
    return {**tensors, **{n.replace(".h.1.", ".h.2."): t for n, t in tensors.items()}}


def _lora_only(tensors):
    return {name: tensor for name, tensor in tensors.items() if "lora_" in name}


def _not_finite(tensors):
    name = "module.transformer.h.0.mlp.c_fc.bias"
    return {**tensors, name: tensors[name] * float("nan")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_narrow, "is a model of another size: transformer.h.0.mlp.c_fc.weight is (16, 8)"),
        (_shallow, "lacks"),
        (_deep, "tensors that the model does not have"),
        (_lora_only, "holds LoRA weights only, without the base"),
        (_not_finite, "transformer.h.0.mlp.c_fc.bias holds values that are not finite"),
    ],
)
def test_a_base_that_does_not_fit(tiny, finished, tmp_path, error_of, change, message):
    path = tmp_path / "other.pt"
    torch.save(change(read_tensors(tiny.base_with_lora)[0]), path)
    error = error_of(tiny.flags(finished, "--max_step", 4, "--init_checkpoint", path))
    assert str(path) in error
    assert message in error


def test_a_work_folder_that_is_a_file(tiny, tmp_path, error_of):
    path = tmp_path / "file"
    path.write_text("kept")
    assert str(path) in error_of(tiny.flags(path, "--max_step", 4))
    assert path.read_text() == "kept"


def test_a_loss_that_is_not_finite_ends_the_run(tiny, tmp_path, error_of, read_metrics):
    """The rate explodes at the fifth step; what was saved before is kept."""
    more = "--scheduler cycle --i_steps 0,3,4,12 --i_lrs 0.01,0.01,1e30,1e30 --save_interval 3"
    error = error_of(tiny.flags(tmp_path, *more.split()))
    assert "the loss of step 6 is nan at learning rate 1e+30: that step is not saved" in error
    assert list(models_of(tmp_path)) == [3, 4]
    assert [row["step"] for row in read_metrics(tmp_path)[0]] == [1, 2, 3, 4, 5]
    assert torch.load(tmp_path / "resume.pt", weights_only=True)["step"] == 4


@pytest.mark.parametrize(
    ("more", "rate", "count"),
    [("", "1e-05", 1), ("--scheduler cycle --i_steps 0,1 --i_lrs 0.1,0.2", "0.1,0.2", 0)],
)
def test_the_rate_is_logged_and_the_default_is_warned_of_with_lora(
    tiny, tmp_path, caplog, more, rate, count
):
    gpt2_ft.main(tiny.flags(tmp_path / "lora", *f"--max_step 1 {more}".split()))
    assert caplog.text.count("--lr is not given: it is 1e-05, the release's default") == count
    assert f"  learning rate  {rate}\n" in caplog.text


def test_a_validation_loss_that_is_not_finite_ends_the_run(tiny, tmp_path, error_of, read_metrics):
    more = "--max_step 4 --eval_interval 1 --lr 1e30 --scheduler constant"
    error = error_of(tiny.flags(tmp_path, *more.split()))
    assert "the validation loss after step 1 is nan" in error
    assert read_metrics(tmp_path)[1] == []


def test_an_error_of_the_script_is_one_line(trial, tmp_path):
    data = tmp_path / "bad.jsonl"
    data.write_text('{"context": [1], "completion": [2]}\n{"context"\n')
    argv = trial.flags(tmp_path / "run", "--max_step", 1, "--train_data", data)
    result = subprocess.run([sys.executable, SCRIPT, *argv], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stdout == ""
    line, end = result.stderr.split("\n")
    assert line.startswith(f"gpt2_ft.py: error: {data}:2: not JSON")
    assert end == ""


def test_a_run_has_no_heavy_imports(trial, tmp_path):
    """The run writes a checkpoint, but no metrics, because the first ones import TensorBoard."""
    argv = trial.flags(tmp_path / "run", "--max_step", 2, "--log_interval", 100)
    code = (
        "import json, runpy, sys\n"
        f"sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        f"sys.argv = {[str(SCRIPT), *argv]}\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
        "print(json.dumps([*sys.modules]))"
    )
    result = fork_server("torch").run(["-c", code], os.environ, 60)
    assert (tmp_path / "run" / "model.2.pt").is_file(), result.stderr
    heavy = {"datasets", "pandas", "scipy", "sympy", "tensorboard", "torch._dynamo"}
    assert not heavy & {*json.loads(result.stdout.splitlines()[-1])}
