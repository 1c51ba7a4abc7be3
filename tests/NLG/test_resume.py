"""Tests gpt2_ft.py --resume: killed runs end bit-exact, and runs that do not fit are refused."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from bit_flips import flip_bit_in
from launches import fork_server
from product_methods import ChosenMethods

import gpt2_ft
from loralib.io.tensors import read_tensors
from loralib.lora_layer import LoRALayer
from loralib.training.locks import sole_use
from optimizer import Scheduler
from run_state import read_run
from weights import own_tensors

pytestmark = pytest.mark.slow

SCRIPT = Path(gpt2_ft.__file__)
STEP = Scheduler, "step"  # the first call of a step

# An epoch has four batches. With --grad_acc, neither the save interval nor the end of every epoch
# is a multiple of it.
RUNS = {
    "lora": (
        "--max_epoch 3 --grad_acc 3 --save_interval 4 --lora_dropout 0.3 --lr 0.03 --warmup_step 2"
        " --label_smooth 0.1 --eval_interval 5"
    ),
    "bf16": (
        "--max_epoch 2 --save_interval 3 --lora_dropout 0.3 --lr 0.03 --correct_bias --bf16"
        " --scheduler constant --eval_interval 3"
    ),
    "whole model": (
        "--max_step 10 --grad_acc 2 --save_interval 3 --lr 0.003 --scheduler cosine --clip 0.5"
        " --no_decay_bias --eval_interval 4 --obj jlm"
    ),
    "new lora": (
        "--scheduler cycle --i_steps 0,3,9 --i_lrs 0.001,0.03,0.01 --grad_acc 2 --save_interval 5"
        " --lora_dropout 0.2 --eval_interval 100 --save_lora_only"
    ),
    "new lora on every projection": (
        "--lora_targets query value key attention_output mlp_up mlp_down --max_step 8"
        " --save_interval 3 --lora_dropout 0.2 --lr 0.01 --eval_interval 5 --lora_plus_ratio 3"
    ),
    "new dora from pissa": (
        "--lora_variant dora --lora_init pissa --lora_rank_pattern h.0.*=3 --max_step 8"
        " --save_interval 3 --lora_dropout 0.2 --lr 0.01 --eval_interval 5 --lora_plus_ratio 16"
    ),
    "new lora with a frozen A": (
        "--lora_variant rslora --lora_init orthogonal --lora_freeze_A --lora_alpha_pattern h.1.*=3"
        " --lora_plus_ratio 0.7 --bf16 --max_step 8 --save_interval 3 --lora_dropout 0.2 --lr 0.01"
    ),
}


HALVES = ("", "--bf16", "--fp16")


class Killed(BaseException):
    """Stands in for a kill: nothing in the script catches it."""


def arguments(trial, name: str, work_dir: Path) -> list[str]:
    argv = trial.flags(work_dir, *RUNS[name].split(), lora=name != "whole model")
    if name.startswith("new"):
        argv[argv.index("--init_checkpoint") + 1] = str(trial.base)
    return argv


def run_until(argv: list[str], function: tuple[object, str], call: int, monkeypatch) -> None:
    """Trains until the n-th call of a function, given by owner and name, raises `Killed`."""
    owner, name = function
    original, calls = getattr(owner, name), 0

    def killing(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == call:
            raise Killed
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, killing)
        with pytest.raises(Killed):
            gpt2_ft.main(argv)


@pytest.fixture
def result_of(read_metrics):
    """``result_of(work_dir)``: what a run has written that must not depend on kills."""

    def result(work_dir: Path) -> dict:
        steps, evaluations = read_metrics(work_dir)
        models = {}
        for path in work_dir.glob("model.*.pt"):
            tensors, metadata = read_tensors(path)
            models[path.name] = metadata, {n: t.numpy().tobytes() for n, t in tensors.items()}
        figures = [(row["step"], row["loss"], row["lr"]) for row in steps]
        assert [step for step, *_ in figures] == list(range(1, len(figures) + 1))
        return {"steps": figures, "evaluations": evaluations, "models": models}

    return result


@pytest.fixture
def resumed_steps(monkeypatch):
    """A list of the steps that are made from here on."""
    done = []
    original = Scheduler.step

    def counting(scheduler):
        done.append(scheduler.state_dict()["step"] + 1)
        original(scheduler)

    monkeypatch.setattr(Scheduler, "step", counting)
    return done


def test_a_resumed_run_keeps_its_linear_methods(tiny, tmp_path, monkeypatch):
    """It keeps them even if another method is the fastest when it resumes."""
    argv = arguments(tiny, "lora", tmp_path / "run")
    methods, in_use, step = ChosenMethods(monkeypatch, tmp_path), [], Scheduler.step

    def noting(scheduler):
        in_use.append(methods.in_use())
        step(scheduler)

    methods.fastest("blocks")
    run_until(argv, STEP, 9, monkeypatch)
    monkeypatch.setattr(Scheduler, "step", noting)
    methods.fastest("plain")
    gpt2_ft.main([*argv, "--resume"])
    assert set(map(frozenset, in_use)) == {frozenset({"blocks"})}
    in_use.clear()
    gpt2_ft.main(arguments(tiny, "lora", tmp_path / "another"))
    assert set(map(frozenset, in_use)) == {frozenset({"plain"})}


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["", "--fp16", *(f"--no_cuda_graphs {h}" for h in HALVES)])
@pytest.mark.parametrize("name", ["lora", "whole model", "new dora from pissa"])
def test_a_run_killed_on_a_gpu_ends_bit_exact(tiny, tmp_path, monkeypatch, result_of, name, how):
    """With CUDA graphs, the default, the resumed run records them in other steps."""
    more = ["--use_deterministic_algorithms", *how.split()]
    whole, killed = (tmp_path / folder for folder in ("whole", "killed"))
    gpt2_ft.main([*arguments(tiny, name, whole), *more])
    run_until([*arguments(tiny, name, killed), *more], STEP, 5, monkeypatch)
    gpt2_ft.main([*arguments(tiny, name, killed), *more, "--resume"])
    assert result_of(killed) == result_of(whole)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_killed_in_any_step_ends_bit_exact(
    tiny, tmp_path, monkeypatch, result_of, resumed_steps, name
):
    whole = tmp_path / "whole"
    gpt2_ft.main(arguments(tiny, name, whole))
    expected, last = result_of(whole), len(resumed_steps)
    assert last >= 8
    repeated = 0
    # What a kill leaves depends on the step, and not on what is trained.
    steps = range(last, 0, -1 if name == "lora" else -3)
    for step in steps:
        work_dir = tmp_path / f"killed-in-{step}"
        argv = arguments(tiny, name, work_dir)
        run_until(argv, STEP, step, monkeypatch)
        resumed_steps.clear()
        gpt2_ft.main([*argv, "--resume"])
        assert resumed_steps == list(range(resumed_steps[0], last + 1))
        repeated += step - resumed_steps[0]
        assert result_of(work_dir) == expected
    # Resumed runs repeat few steps.
    assert 0 < repeated < len(steps) * last / 3


@pytest.mark.parametrize(
    ("function", "call"),
    [
        ((gpt2_ft, "write_run"), 1),
        ((gpt2_ft, "write_run"), 2),
        ((gpt2_ft, "save_model"), 2),
        ((gpt2_ft.MetricsLog, "write"), 9),
        ((gpt2_ft, "evaluate"), 2),
        ((gpt2_ft, "write_finished"), 1),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else None,
)
def test_a_run_killed_between_steps_ends_bit_exact(
    tiny, tmp_path, monkeypatch, result_of, function, call
):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    gpt2_ft.main(arguments(tiny, "lora", whole))
    argv = arguments(tiny, "lora", killed)
    run_until(argv, function, call, monkeypatch)
    # A kill leaves a part of the line that is being written.
    with open(killed / "metrics.jsonl", "a") as file:
        file.write('{"step": 9, "lo')
    run_until([*argv, "--resume"], STEP, 2, monkeypatch)
    gpt2_ft.main([*argv, "--resume"])
    assert result_of(killed) == result_of(whole)


def test_a_killed_process_can_be_resumed(
    trial, one_process, tmp_path, error_of, files_of, result_of
):
    more = "--max_epoch 12 --grad_acc 2 --save_interval 7 --lora_dropout 0.1 --lr 0.01"
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    argv = trial.flags(killed, *more.split())
    printed = [tmp_path / name for name in ("stdout", "stderr")]
    process = fork_server("NLG").start([SCRIPT, *argv], os.environ, printed)
    metrics = killed / "metrics.jsonl"
    while not metrics.is_file() or metrics.read_bytes().count(b"\n") < 17:
        assert process.poll() is None
        time.sleep(0.002)
    process.kill()
    assert process.returncode == -signal.SIGKILL

    before = files_of(killed)
    assert {"model.7.pt", "model.14.pt", "resume.pt", "metrics.jsonl"} <= before.keys()
    assert f"{killed}: holds an unfinished run, at step " in error_of(argv)
    assert files_of(killed) == before

    gpt2_ft.main([*argv, "--resume"])
    gpt2_ft.main(trial.flags(whole, *more.split()))
    assert result_of(killed) == result_of(whole)


@pytest.mark.distributed
@pytest.mark.parametrize("lora", ["", "--lora_variant dora --lora_init pissa --lora_plus_ratio 4"])
def test_a_run_of_three_processes_with_one_killed_ends_bit_exact(
    launch_tiny, tiny, tmp_path, error_of, result_of, lora
):
    """With three, the order in which gradients are summed matters, too."""
    more = "--train_batch_size 2 --max_epoch 5 --correct_bias --lora_dropout 0.2 --lr 0.01"
    more += " --grad_acc 2 --save_interval 3 --eval_interval 4"
    if lora:
        more += f" --init_checkpoint {tiny.base} {lora}"
    whole, killed = (tiny.flags(tmp_path / name, *more.split()) for name in ("whole", "killed"))
    result = launch_tiny("torch.distributed.launch", whole, killed, kill_in_step=6, processes=3)
    assert result.returncode != 0
    assert (tmp_path / "whole" / "model.10.pt").is_file()
    state = torch.load(tmp_path / "killed" / "resume.pt", weights_only=True)
    # Process 1 may die before process 0, for which it does not wait, has written step 4.
    assert state["step"] in (2, 4)
    assert not state["finished"]
    generators = [state["rng_state"][rank]["torch"].numpy().tobytes() for rank in range(3)]
    assert len(set(generators)) == 3

    message = "belongs to a run with number of processes 3, but this run has 1"
    assert message in error_of([*killed, "--resume"])

    result = launch_tiny("torch.distributed.run", [*killed, "--resume"], processes=3)
    assert result.returncode == 0, result.stderr
    assert f"resume.pt, step {state['step']}\n" in result.stderr
    assert result_of(tmp_path / "killed") == result_of(tmp_path / "whole")


@pytest.fixture
def killed(tiny, tmp_path, monkeypatch):
    """The arguments of a run that was killed in its eleventh step."""
    argv = arguments(tiny, "lora", tmp_path / "run")
    run_until(argv, STEP, 11, monkeypatch)
    return argv


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("--lr 0.02", "--lr 0.03, but this run has 0.02"),
        ("--random_seed 11", "--random_seed 10, but this run has 11"),
        ("--grad_acc 1", "--grad_acc 3, but this run has 1"),
        ("--lora_dropout 0", "--lora_dropout 0.3, but this run has 0.0"),
        ("--obj jlm", "--obj clm, but this run has jlm"),
        ("--bf16", "--bf16 False, but this run has True"),
        ("--tf32", "--tf32 False, but this run has True"),
        (
            "--use_deterministic_algorithms",
            "--use_deterministic_algorithms False, but this run has True",
        ),
        ("--correct_bias", "--correct_bias False, but this run has True"),
        ("--scheduler cosine", "--scheduler linear, but this run has cosine"),
        ("--seq_len 11", "--seq_len 12, but this run has 11"),
        ("--train_batch_size 2", "--train_batch_size 4, but this run has 2"),
        ("--train_data {folder}/valid.jsonl --max_step 12", "training data"),
        ("--init_checkpoint {folder}/other.pt", "base"),
        ("--init_checkpoint {folder}/base.pt --lora_dim 1", "--lora_dim 2, but this run has 1"),
        (
            "--init_checkpoint {folder}/base.pt --lora_alpha 4",
            "--lora_alpha 8.0, but this run has 4.0",
        ),
        (
            "--init_checkpoint {folder}/base.pt --lora_targets mlp_up key",
            "--lora_targets query value, but this run has key mlp_up",
        ),
        (
            "--init_checkpoint {folder}/base.pt --lora_variant dora",
            "--lora_variant lora, but this run has dora",
        ),
        (
            "--init_checkpoint {folder}/base.pt --lora_init olora",
            "--lora_init default, but this run has olora",
        ),
        (
            "--init_checkpoint {folder}/base.pt --lora_freeze_A",
            "--lora_freeze_A False, but this run has True",
        ),
        ("--lora_plus_ratio 16", "--lora_plus_ratio 1.0, but this run has 16.0"),
        (
            "--init_checkpoint {folder}/base.pt --lora_rank_pattern h.0.*=1",
            "--lora_rank_pattern None, but this run has transformer.h.0.attn.c_attn=1",
        ),
        (
            "--init_checkpoint {folder}/base.pt --lora_alpha_pattern c_attn=1 h.0.*=2",
            "--lora_alpha_pattern None, but this run has transformer.h.0.attn.c_attn=1.0 "
            "transformer.h.1.attn.c_attn=1.0",
        ),
    ],
)
def test_a_run_is_not_resumed_with_other_settings(
    tiny, killed, error_of, files_of, device_settings, more, named
):
    _other_base(tiny.folder)
    work_dir = Path(killed[killed.index("--work_dir") + 1])
    before = files_of(work_dir)
    given = [word.format(folder=tiny.folder) for word in more.split()]
    line = error_of([*killed, "--resume", *given])
    assert f"{work_dir}: belongs to a run with {named}" in line
    assert files_of(work_dir) == before


def _other_base(folder: Path) -> None:
    tensors, metadata = read_tensors(folder / "base_with_lora.pt")
    tensors["module.transformer.wte.weight"] = tensors["module.transformer.wte.weight"] + 1
    torch.save({"model_state_dict": tensors, "metadata": metadata}, folder / "other.pt")


@pytest.mark.parametrize("name", ["new dora from pissa", "new lora with a frozen A"])
def test_loras_initial_values_are_restored(tiny, tmp_path, monkeypatch, result_of, name):
    """Other versions of libraries may decompose weights or draw numbers differently."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    gpt2_ft.main(arguments(tiny, name, whole))
    argv = arguments(tiny, name, killed)
    run_until(argv, STEP, 7, monkeypatch)
    original = LoRALayer.reset_lora_parameters

    def other(layer):
        original(layer)
        for name, tensor in own_tensors(layer).items():
            if name.startswith("lora_A"):
                tensor.data.neg_()

    monkeypatch.setattr(LoRALayer, "reset_lora_parameters", other)
    gpt2_ft.main([*argv, "--resume"])
    assert result_of(killed) == result_of(whole)


def test_equivalent_patterns_are_the_same_run(tiny, tmp_path, monkeypatch, result_of):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    patterns = ("h.0.*=1", "h.1.attn.c_attn=2 c_attn=1")
    runs = [
        [*arguments(tiny, "new lora", folder), "--lora_rank_pattern", *pattern.split()]
        for folder, pattern in zip((killed, whole), patterns, strict=True)
    ]
    run_until(runs[0], STEP, 7, monkeypatch)
    gpt2_ft.main(runs[1])
    gpt2_ft.main([*arguments(tiny, "new lora", killed), "--resume", *runs[1][-3:]])
    assert result_of(killed) == result_of(whole)


def test_resuming_on_another_kind_of_device_is_warned_of(killed, caplog):
    path = Path(killed[killed.index("--work_dir") + 1]) / "resume.pt"
    state = torch.load(path, weights_only=True)
    if not torch.cuda.is_available():
        assert "cuda" not in state["rng_state"][0]
        state["rng_state"][0]["cuda"] = torch.zeros(16, dtype=torch.uint8)
    else:
        del state["rng_state"][0]["cuda"]
    torch.save(state, path)
    gpt2_ft.main([*killed, "--resume"])
    (line,) = [message for message in caplog.messages if "bit-exact" in message]
    assert "resumes, but not bit-exactly: the checkpoint was written on a " in line


@pytest.mark.parametrize("more_threads", [0, 3])
def test_another_number_of_threads_is_warned_of(killed, caplog, more_threads):
    path = Path(killed[killed.index("--work_dir") + 1]) / "resume.pt"
    state, now = torch.load(path, weights_only=True), torch.get_num_threads()
    assert state["threads"] == now
    state["threads"] = now + more_threads
    torch.save(state, path)
    gpt2_ft.main([*killed, "--resume"])
    warnings = [message for message in caplog.messages if "OMP_NUM_THREADS" in message]
    on_cpu = not torch.cuda.is_available()
    assert len(warnings) == (bool(more_threads) and on_cpu)
    assert not warnings or f"with OMP_NUM_THREADS={now + 3}, this run has {now}," in warnings[0]


@pytest.mark.parametrize("asked", [True, False])
def test_settings_of_the_device(tiny, device_settings, tmp_path, asked):
    device_settings.write(not asked, not asked, True, False)
    more = ["--tf32", "--use_deterministic_algorithms"] if asked else []
    gpt2_ft.main(tiny.flags(tmp_path / "run", "--max_step", 1, *more))
    device_settings.expect(tf32=asked, deterministic=asked)


def test_settings_that_do_not_affect_the_model_may_change(tiny, killed, tmp_path):
    more = "--resume --log_interval 2 --save_interval 7 --eval_interval 3 --valid_batch_size 1"
    gpt2_ft.main([*killed, *more.split()])
    gpt2_ft.main(arguments(tiny, "lora", tmp_path / "whole"))
    ends = [read_tensors(tmp_path / name / "model.12.pt")[0] for name in ("run", "whole")]
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())


def test_an_unfinished_run_is_not_overwritten(killed, error_of, files_of):
    work_dir = Path(killed[killed.index("--work_dir") + 1])
    before = files_of(work_dir)
    line = error_of(killed)
    assert f"{work_dir}: holds an unfinished run, at step 9: resume it with --resume" in line
    assert files_of(work_dir) == before


def test_a_finished_run_is_left_alone(tiny, tmp_path, caplog, files_of):
    argv = arguments(tiny, "lora", tmp_path / "run")
    gpt2_ft.main(argv)
    before = files_of(tmp_path / "run")
    gpt2_ft.main([*argv, "--resume"])
    assert "this run is finished" in caplog.text
    assert files_of(tmp_path / "run") == before


def test_the_models_of_two_runs_are_not_mixed(tiny, tmp_path, error_of, files_of):
    argv = arguments(tiny, "lora", tmp_path / "run")
    gpt2_ft.main(argv)
    before = files_of(tmp_path / "run")
    assert f"{tmp_path / 'run'}: holds models of another run" in error_of([*argv, "--lr", "0.5"])
    assert files_of(tmp_path / "run") == before


@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_a_model_of_another_run_is_an_error(tiny, tmp_path, error_of, resume):
    """Recipes always resume, and decode the model of the last step."""
    argv = arguments(tiny, "lora", tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model.26289.pt").write_bytes(b"another's")
    assert f"{tmp_path / 'run'}: holds models of another run" in error_of([*argv, *resume])


def test_a_run_that_was_killed_after_its_first_model(tiny, tmp_path, monkeypatch, error_of):
    """There is a model, but no state to resume from, only the mark of whose the folder is."""
    argv = arguments(tiny, "lora", tmp_path / "run")
    run_until(argv, (gpt2_ft, "write_run"), 1, monkeypatch)
    assert [path.name for path in (tmp_path / "run").glob("model.*")] == ["model.4.pt"]
    assert "holds models of another run" in error_of(argv)
    assert "holds models of another run" in error_of([*argv, "--resume", "--lr", "0.5"])
    gpt2_ft.main([*argv, "--resume"])
    assert read_run(tmp_path / "run")["finished"]


def test_a_run_killed_before_its_first_model_may_change_its_settings(tiny, tmp_path, monkeypatch):
    argv = arguments(tiny, "lora", tmp_path / "run")
    run_until(argv, STEP, 1, monkeypatch)
    assert read_run(tmp_path / "run")["step"] == 0
    gpt2_ft.main([*argv, "--resume", "--lr", "0.01"])
    assert read_run(tmp_path / "run")["run"]["--lr"] == 0.01


@pytest.mark.parametrize(("scheduler", "steps"), [("linear", 16), ("linear", 10), ("constant", 16)])
def test_a_run_resumes_with_another_length(
    tiny, tmp_path, monkeypatch, caplog, result_of, read_metrics, scheduler, steps
):
    """The rate follows the new length from there on. A constant rate does not depend on it."""
    more = f"--save_interval 5 --lora_dropout 0.2 --lr 0.01 --scheduler {scheduler} --max_step"
    argv, whole = (tiny.flags(tmp_path / name, *more.split()) for name in ("run", "whole"))
    gpt2_ft.main([*whole, str(steps)])
    run_until([*argv, "12"], STEP, 12, monkeypatch)
    caplog.clear()
    gpt2_ft.main([*argv, str(steps), "--resume"])
    message = (
        f"{tmp_path / 'run'} belongs to a run of 12 steps, but this run has {steps}: from here on"
    )
    assert message in caplog.text
    rates = [[row["lr"] for row in read_metrics(tmp_path / name)[0]] for name in ("run", "whole")]
    assert rates[0][10:] == rates[1][10:]
    assert len(rates[0]) == steps
    assert (tmp_path / "run" / f"model.{steps}.pt").is_file()
    assert read_run(tmp_path / "run")["finished"]
    assert (result_of(tmp_path / "run") == result_of(tmp_path / "whole")) == (
        scheduler == "constant"
    )


def test_models_after_the_step_resumed_from_are_removed(tiny, tmp_path, monkeypatch, caplog):
    """Recipes decode the model of the last step, which would not be the resumed run's."""
    argv = tiny.flags(tmp_path / "run", "--save_interval", "5", "--max_step")
    run_until([*argv, "12"], (gpt2_ft, "write_run"), 3, monkeypatch)
    later = tmp_path / "run" / "model.8.pt"
    assert later.is_file()
    own = later.with_name("model.8.mine.pt")
    own.write_bytes(b"a copy of the user's")
    gpt2_ft.main([*argv, "7", "--resume"])
    assert f"removed {later}: the run is resumed from step 5" in caplog.text
    models = {path.name for path in (tmp_path / "run").glob("model.*.pt")}
    assert models == {"model.4.pt", "model.5.pt", "model.7.pt", own.name}
    assert "; 7 steps, the last 2 in " in caplog.text


def test_a_shorter_epoch_limit_or_a_longer_one_after_the_end_is_refused(
    tiny, tmp_path, monkeypatch, error_of
):
    """The smaller --max_epoch would end the run at once, the larger one continue a finished run."""
    argv = tiny.flags(
        tmp_path / "run", *["--max_step", "40", "--max_epoch", "3", "--save_interval", "3"]
    )
    run_until(argv, STEP, 8, monkeypatch)
    line = error_of([*argv, "--max_epoch", "1", "--resume"])
    assert f"{tmp_path / 'run'}: has made 6 steps, but this run ends after 4: give the leng" in line
    gpt2_ft.main([*argv, "--resume"])
    line = error_of([*argv, "--max_epoch", "4", "--resume"])
    assert (
        "belongs to a run with number of steps 12, but this run has 16: it is finished; begin"
        in line
    )
    (step,) = (tmp_path / "run").glob("model.12.pt")
    longer = tiny.flags(tmp_path / "longer", "--max_step", "2", "--init_checkpoint", str(step))
    gpt2_ft.main(longer)
    assert (tmp_path / "longer" / "model.2.pt").is_file()


def test_a_run_without_an_update_is_refused(tiny, tmp_path, error_of, caplog):
    argv = tiny.flags(tmp_path / "run", *["--max_step", "4", "--grad_acc", "5"])
    assert "--grad_acc 5: the run has 4 steps, so it would make no update" in error_of(argv)
    gpt2_ft.main(tiny.flags(tmp_path / "run", *["--max_step", "4", "--grad_acc", "3"]))
    assert "--grad_acc 3: the last 1 of 4 steps make no update" in caplog.text


def test_a_finished_run_can_be_started_over(tiny, tmp_path, monkeypatch, result_of):
    """The second run, killed before its first checkpoint, must not count as finished."""
    argv = arguments(tiny, "lora", tmp_path / "run")
    gpt2_ft.main(argv)
    first = result_of(tmp_path / "run")
    for path in (tmp_path / "run").glob("model.*.pt"):
        path.unlink()
    run_until(argv, STEP, 2, monkeypatch)
    gpt2_ft.main([*argv, "--resume"])
    assert result_of(tmp_path / "run") == first


def test_a_second_run_in_the_same_folder_at_once_is_refused(tiny, tmp_path, error_of):
    argv = arguments(tiny, "lora", tmp_path / "run")
    (tmp_path / "run").mkdir()
    with sole_use(tmp_path / "run"):
        assert f"{tmp_path / 'run'}: another run is writing there" in error_of(argv)
    gpt2_ft.main(argv)


def test_files_that_a_kill_left_half_written_are_removed(tiny, tmp_path):
    argv = arguments(tiny, "lora", tmp_path / "run")
    (tmp_path / "run").mkdir()
    for name in ("model.4.pt", "resume.pt", "metrics.jsonl", "learning_curves.png"):
        half = f".{name}.half-x1y2z3_4{Path(name).suffix}"
        (tmp_path / "run" / half).write_bytes(b"half")
    gpt2_ft.main(argv)
    assert not list((tmp_path / "run").glob(".*x1y2z3_4*"))


def test_damaged_lines_of_the_log_are_left_out(killed, caplog):
    metrics = Path(killed[killed.index("--work_dir") + 1]) / "metrics.jsonl"
    whole = metrics.read_bytes()
    metrics.write_bytes(whole + b"\0\0\0\n[1]\n" + b'{"step": 1')
    gpt2_ft.main([*killed, "--resume"])
    assert f"{metrics}: left out 3 damaged lines" in caplog.text
    assert metrics.read_bytes().startswith(whole[:40])


def test_without_a_run_to_resume_a_new_one_begins(tiny, tmp_path, caplog, result_of):
    argv = arguments(tiny, "lora", tmp_path / "run")
    gpt2_ft.main([*argv, "--resume"])
    assert "holds no run to resume: starting a new one" in caplog.text
    gpt2_ft.main(arguments(tiny, "lora", tmp_path / "other"))
    assert result_of(tmp_path / "run") == result_of(tmp_path / "other")


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _another_file(path: Path) -> None:
    shutil.copy(path.with_name("model.8.pt"), path)


def _flipped(path: Path) -> None:
    flip_bit_in(path, torch.load(path, weights_only=True)["optimizer"]["state"][0]["exp_avg"])


def _a_list(path: Path) -> None:
    torch.save([1, 2], path)


@pytest.mark.parametrize("damage", [_cut, _empty, _another_file, _flipped, _a_list])
@pytest.mark.parametrize("more", [[], ["--resume"]])
def test_a_damaged_file_is_an_error(killed, error_of, files_of, damage, more):
    work_dir = Path(killed[killed.index("--work_dir") + 1])
    damage(work_dir / "resume.pt")
    before = files_of(work_dir)
    assert f"{work_dir}/resume.pt: missing or damaged (" in error_of([*killed, *more])
    assert files_of(work_dir) == before


FIELDS = {
    "no best_ppl": lambda state: state.pop("best_ppl"),
    "step as text": lambda state: state.update(step="8"),
    "best_ppl as a list": lambda state: state.update(best_ppl=[]),
    "no weights": lambda state: state.update(trained={}),
    "weights of another shape": lambda state: _cut_first(state["trained"]),
    "no optimizer": lambda state: state.pop("optimizer"),
    "another optimizer": lambda state: state.update(optimizer={"state": {}, "param_groups": []}),
    "averages of another shape": lambda state: _cut_first(state["optimizer"]["state"][0]),
    "no rate": lambda state: state["scheduler"].pop("lr"),
    "no generators": lambda state: state.update(rng_state=[]),
    "half a generator": lambda state: state["rng_state"][0].update(torch=torch.zeros(3)),
}


def _cut_first(tensors) -> None:
    name = next(name for name, value in tensors.items() if isinstance(value, torch.Tensor))
    tensors[name] = tensors[name][:1].clone()


@pytest.mark.parametrize("name", FIELDS)
def test_a_state_with_damaged_fields_is_an_error(killed, error_of, files_of, name):
    path = Path(killed[killed.index("--work_dir") + 1]) / "resume.pt"
    state = torch.load(path, weights_only=True)
    FIELDS[name](state)
    torch.save(state, path)
    before = files_of(path.parent)
    line = error_of([*killed, "--resume"])
    assert f"{path}: missing or damaged (" in line
    assert line.endswith("); remove it and the model.*.pt next to it to start the run over")
    assert files_of(path.parent) == before


def test_the_data_may_change_once_it_is_read(tiny, tmp_path, monkeypatch):
    """A run is identified by the data that it has read."""
    data = tmp_path / "train.jsonl"
    shutil.copy(tiny.folder / "train.jsonl", data)
    argv = arguments(tiny, "lora", tmp_path / "run")
    argv[argv.index("--train_data") + 1] = str(data)
    original = gpt2_ft.save_model

    def save(*arguments):
        data.unlink(missing_ok=True)
        original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(gpt2_ft, "save_model", save)
        run_until(argv, STEP, 11, monkeypatch)
    shutil.copy(tiny.folder / "train.jsonl", data)
    gpt2_ft.main([*argv, "--resume"])
    assert (tmp_path / "run" / "model.12.pt").is_file()


def test_weights_that_are_not_finite_do_not_replace_what_is_saved(tiny, tmp_path, error_of):
    """The rate explodes in step 6, whose loss is still finite.

    The checkpoint of step 5 is due after step 6, because step 5 makes no update.
    """
    more = "--scheduler cycle --i_steps 0,4,5,12 --i_lrs 0.001,0.001,1e30,1e30 --grad_acc 2 "
    more += "--save_interval 5 --correct_bias --weight_decay 1e5"
    argv = tiny.flags(tmp_path / "run", *more.split())
    assert "not finite" in error_of(argv)
    state = read_run(tmp_path / "run")
    assert state["step"] == 4
    assert all(torch.isfinite(tensor).all() for tensor in state["trained"].values())
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["step"] == 6
