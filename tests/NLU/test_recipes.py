"""The recipes of NLU/: their values, their commands, and a few steps of each on a small base.

Every script is run with --print, and run_glue.py's parser reads its command's flags. Each recipe
trains for two steps in this process; two that depend on each other also run as a user runs them.
"""

import importlib.util
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from launches import preloaded_python

import loralib as lora
from transformers import HfArgumentParser, RobertaConfig, RobertaForSequenceClassification

ROOT = Path(__file__).resolve().parents[2]
NLU = ROOT / "NLU"
FACTS = ROOT.parent / "shared" / "facts"
SCRIPTS = sorted(path.stem for path in NLU.glob("*.sh"))
AFTER_MNLI = [name for name in SCRIPTS if name.endswith(("_mrpc", "_rte", "_stsb"))]

# The fixture with a small base for each model.
SMALL_BASES = {
    "roberta-base": "tiny_base",
    "roberta-large": "tiny_base",
    "microsoft/deberta-v2-xxlarge": "tiny_deberta_base",
}
# What decides how long a text may be, in the published models' configurations.
PUBLISHED_POSITIONS = {
    "roberta-base": {"max_position_embeddings": 514, "pad_token_id": 1},
    "roberta-large": {"max_position_embeddings": 514, "pad_token_id": 1},
    "microsoft/deberta-v2-xxlarge": {
        "max_position_embeddings": 512,
        "position_biased_input": False,
        "relative_attention": True,
        "position_buckets": 256,
    },
}


def load_recipe_module():
    name = "nlu_tests_recipe"
    spec = importlib.util.spec_from_file_location(name, NLU / "recipe.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


recipe = load_recipe_module()
RECIPES = recipe.read_recipes()


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch, tmp_path):
    """Unsets the environment variables of recipes, and changes to a temporary folder."""
    for name in ("NPROC", "MNLI_CHECKPOINT", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def small_glue(tiny_glue, tmp_path_factory) -> Path:
    """All eight tasks: those of `tiny_glue`, and four more with the texts of its RTE."""
    root = tmp_path_factory.mktemp("glue") / "all"
    shutil.copytree(tiny_glue, root)
    columns = {
        "MRPC": ("Quality", "#1 String", "#2 String"),
        "QQP": ("is_duplicate", "question1", "question2"),
        "QNLI": ("label", "question", "sentence"),
        "STS-B": ("score", "sentence1", "sentence2"),
    }
    for split in ("train", "dev"):
        lines = (root / "RTE" / f"{split}.tsv").read_text(encoding="utf-8").splitlines()[1:]
        rows = [line.split("\t") for line in lines]
        for task, header in columns.items():
            table = ["\t".join(header)]
            for number, first, second, word in rows:
                label = {
                    "QNLI": word,
                    "STS-B": f"{int(number) % 11 / 2}",
                }.get(task, str(int(word == "entailment")))
                table.append("\t".join((label, first, second)))
            (root / task).mkdir(exist_ok=True)
            (root / task / f"{split}.tsv").write_text("\n".join(table) + "\n", encoding="utf-8")
    return root


# ---- the table ----


def test_every_recipe_has_its_script():
    assert len(SCRIPTS) == 28
    assert set(SCRIPTS) == set(RECIPES)


def test_the_values_equal_the_release_s():
    path = FACTS / "nlu_release_recipes.json"
    if not path.is_file():
        pytest.skip("the release's recipes are not on this machine")
    release = {
        name.removesuffix(".sh"): (
            entry["num_gpus"],
            entry["env"],
            {flag: None if value is True else value for flag, value in entry["args"].items()},
        )
        for name, entry in json.loads(path.read_text()).items()
    }
    ours = {
        name: (entry.nproc, recipe.read_environment(), dict(entry.flags))
        for name, entry in RECIPES.items()
    }
    # The one difference: cuBLAS's fast kernels for large products need a larger workspace.
    for _, environment, _ in release.values():
        assert environment["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
        environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    assert ours == release


@pytest.mark.parametrize("name", AFTER_MNLI)
def test_a_recipe_starts_from_weights_that_fit(name):
    assert len(AFTER_MNLI) == 9
    first = RECIPES[RECIPES[name].after]
    assert first.flags["task_name"] == "mnli"
    for flag in ("model_name_or_path", "apply_lora", "lora_r", "lora_alpha"):
        assert first.flags[flag] == RECIPES[name].flags[flag]


def test_no_other_recipe_starts_from_weights():
    others = [entry for name, entry in RECIPES.items() if name not in AFTER_MNLI]
    assert [e.name for e in others if e.after or "lora_path" in e.flags] == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_published_model_fits_the_recipe_s_text_length(name):
    from transformers import DebertaV2Config, RobertaConfig
    from transformers.fine_tuning.lengths import check_length

    flags = RECIPES[name].flags
    model = flags["model_name_or_path"]
    config_type = DebertaV2Config if "deberta" in model else RobertaConfig
    check_length(config_type(**PUBLISHED_POSITIONS[model]), int(flags["max_seq_length"]))


# ---- the scripts and their commands ----


def parsed(run_glue, arguments: list[str]) -> dict:
    """Returns run_glue.py's settings by name."""
    names = ("ModelArguments", "DataTrainingArguments", "TrainingArguments", "EstimateArguments")
    types = [getattr(run_glue, name) for name in names]
    settings = HfArgumentParser(types).parse_args_into_dataclasses(arguments)
    return {name: value for part in settings for name, value in vars(part).items()}


def run_script(name: str, *arguments: object, **environment: object) -> subprocess.CompletedProcess:
    python = str(preloaded_python().parent)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    return subprocess.run(
        ["bash", NLU / f"{name}.sh", *map(str, arguments)],
        env={
            **os.environ,
            "PATH": f"{python}{os.pathsep}{os.environ['PATH']}",
            "MASTER_PORT": str(port),
            **{variable: str(value) for variable, value in environment.items()},
        },
        capture_output=True,
        text=True,
        timeout=240,
    )


def typed(command: str) -> list[str]:
    """Returns the words of a command that spans lines."""
    return shlex.split(command.replace("\\\n", " "))


@pytest.mark.parametrize("name", SCRIPTS)
def test_run_glue_parses_a_script_s_command_to_the_recipe_s_values(run_glue, name):
    result = run_script(name, "--print", "--data_dir", "my data", "--seed=7")
    assert result.returncode == 0, result.stderr
    words = typed(result.stdout)
    assert words[:2] == ["CUBLAS_WORKSPACE_CONFIG=:4096:8", "PYTHONHASHSEED=0"]
    assert words[2:5] == ["python", "-m", "torch.distributed.launch"]
    assert words[5] == f"--nproc_per_node={RECIPES[name].nproc}"
    assert (Path.cwd() / words[7]).resolve() == recipe.SCRIPT

    settings = parsed(run_glue, words[8:])
    assert (settings["data_dir"], settings["seed"]) == ("my data", 7)
    assert settings["output_dir"] == f"output/{name}"
    for flag, text in RECIPES[name].flags.items():
        if flag != "seed":
            value = settings[flag]
            assert value == (True if text is None else type(value)(text)), flag


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_s_help_describes_its_recipe(name, capsys):
    with pytest.raises(SystemExit) as ended:
        recipe.main([name, "--help"])
    assert ended.value.code == 0
    assert recipe.about(RECIPES[name]) in " ".join(capsys.readouterr().out.split())
    text = recipe.about(RECIPES[name]).lower().replace("-", "")
    flags = RECIPES[name].flags
    model = flags["model_name_or_path"].removeprefix("microsoft/").replace("-", "")
    assert text.startswith(model)
    assert f" on {flags['task_name']}" in text
    assert f"seed {flags['seed']}." in text


def test_help_without_a_recipe_names_all_of_them(capsys):
    with pytest.raises(SystemExit) as ended:
        recipe.main(["--help"])
    assert ended.value.code == 0
    help_text = " ".join(capsys.readouterr().out.split())
    assert f"describes one of them: {', '.join(RECIPES)}." in help_text


@pytest.fixture
def started(monkeypatch) -> list:
    """Collects (arguments, environment) of each process that `recipe.main` would become."""
    calls = []
    monkeypatch.setattr(
        os, "execve", lambda _, words, environment: calls.append((words, environment))
    )
    return calls


def test_the_user_s_flags_override_the_recipe_s(run_glue, started, monkeypatch):
    monkeypatch.setenv("NPROC", "1")
    recipe.main(["roberta_base_mnli", "--learning_rate", "1e-3", "--overwrite_output_dir", "False"])
    ((words, environment),) = started
    settings = parsed(run_glue, words[words.index("--model_name_or_path") :])
    assert (settings["learning_rate"], settings["overwrite_output_dir"]) == (1e-3, False)
    assert environment["PYTHONHASHSEED"] == "0"
    assert environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_an_estimate_runs_in_one_process_for_the_recipe_s_devices(run_glue, started, monkeypatch):
    """It needs neither the GPUs nor the weights that the recipe needs."""
    monkeypatch.setattr(recipe, "gpu_count", lambda: 0)
    for nproc, flags in ((8, []), (2, ["--estimate_devices", "2"])):
        recipe.main(["deberta_v2_xxlarge_rte", "--estimate", *flags])
        words, _ = started.pop()
        assert "-m" not in words
        assert Path(words[1]).resolve() == recipe.SCRIPT
        settings = parsed(run_glue, words[2:])
        assert settings["estimate"]
        assert settings["estimate_devices"] == nproc
        assert settings["lora_path"] == "mnli/pytorch_model_lora.bin"


# ---- processes ----


@pytest.mark.parametrize(("gpus", "nproc"), [(8, None), (9, ""), (2, "2"), (0, "1"), (0, "3")])
def test_nproc_sets_the_number_of_processes(started, monkeypatch, gpus, nproc):
    monkeypatch.setattr(recipe, "gpu_count", lambda: gpus)
    if nproc is not None:
        monkeypatch.setenv("NPROC", nproc)
    recipe.main(["roberta_base_mnli"])
    assert f"--nproc_per_node={nproc or 8}" in started[0][0]


@pytest.mark.parametrize(
    ("name", "gpus", "advice"),
    [
        ("roberta_base_mnli", 2, "NPROC=2 bash {} --seed 1 --gradient_accumulation_steps 4"),
        ("roberta_base_mnli", 7, "NPROC=4 bash {} --seed 1 --gradient_accumulation_steps 2"),
        ("roberta_base_cola", 1, "NPROC=1 bash {} --seed 1 --gradient_accumulation_steps 2"),
        ("roberta_base_mnli", 0, "NPROC=1 bash {} --seed 1 --gradient_accumulation_steps 8"),
        (
            "mnli.rdrop",
            0,
            "NPROC=1 bash {} --seed 1 --gradient_accumulation_steps 8 --fp16 False --bf16",
        ),
    ],
)
def test_too_few_gpus_are_an_error_with_advice(started, monkeypatch, capsys, name, gpus, advice):
    """Following the error's advice gives batches of the recipe's size."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(recipe, "gpu_count", lambda: gpus)
    monkeypatch.setenv("NPROC", "")  # counts as unset
    with pytest.raises(SystemExit) as ended:
        recipe.main([name, "--seed", "1"])
    message = f", but this machine has {gpus}; for the same batches: "
    assert ended.value.code.startswith(f"{name}.sh: error: the recipe takes")
    assert ended.value.code.endswith(message + advice.format(f"NLU/{name}.sh"))
    assert started == []

    variable, _bash, _script, *flags = shlex.split(advice)
    monkeypatch.setenv(*variable.split("="))
    recipe.main([name, *flags])
    assert len(started) == 1
    assert "examples" not in capsys.readouterr().err


@pytest.mark.parametrize("given", ["--cuda_graphs", "--cuda_graphs True", "--cuda_graphs=True"])
@pytest.mark.parametrize(("gpus", "kept"), [(0, False), (2, True), (1, True)])
def test_the_advice_has_cuda_graphs_only_with_a_gpu(started, monkeypatch, gpus, kept, given):
    monkeypatch.setattr(recipe, "gpu_count", lambda: gpus)
    monkeypatch.setenv("NPROC", "")
    with pytest.raises(SystemExit) as ended:
        recipe.main(["roberta_base_mnli", *given.split(), "--seed", "1"])
    assert ended.value.code.startswith("roberta_base_mnli.sh: error: the recipe takes 8 GPUs")
    flags = f"{given} --seed 1" if kept else "--seed 1"
    assert f"NLU/roberta_base_mnli.sh {flags} --grad" in ended.value.code


@pytest.mark.parametrize(
    ("nproc", "count"), [("01", 1), (" 1", 1), ("+2", 2), ("10\n", 10), ("cpu", os.cpu_count())]
)
def test_nproc_may_be_whatever_the_launcher_accepts(started, monkeypatch, nproc, count):
    # PyTorch's launcher uses one or the other; older versions do not have the second.
    monkeypatch.setattr("os.cpu_count", lambda: count)
    monkeypatch.setattr("torch._utils.cpu_count", lambda: count, raising=False)
    monkeypatch.setenv("NPROC", nproc)
    recipe.main(["roberta_base_mnli"])
    assert f"--nproc_per_node={count}" in started[0][0]


def test_nproc_gpu_without_gpus_is_an_error(started, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("NPROC", "gpu")
    with pytest.raises(SystemExit) as ended:
        recipe.main(["roberta_base_mnli"])
    assert ended.value.code == "roberta_base_mnli.sh: error: NPROC=gpu: this machine has none"
    assert started == []


@pytest.mark.parametrize("nproc", ["0", "-1", "two", "00", "1 2", "1.5", "\N{SUPERSCRIPT TWO}"])
def test_bad_values_of_nproc_are_errors(started, monkeypatch, nproc):
    monkeypatch.setenv("NPROC", nproc)
    with pytest.raises(SystemExit) as ended:
        recipe.main(["roberta_base_mnli"])
    assert ended.value.code.startswith(f"roberta_base_mnli.sh: error: NPROC={nproc}: ")
    assert started == []


@pytest.mark.parametrize(
    ("flags", "examples"),
    [
        ([], 32),
        (["--gradient_accumulation_steps=3"], 96),
        (["--per_device_train_batch_size", "9"], 18),
    ],
)
def test_another_batch_size_is_reported(started, monkeypatch, capsys, flags, examples):
    monkeypatch.setenv("NPROC", "2")
    recipe.main(["roberta_base_mnli", *flags])
    expected = f"each update uses {examples} examples here, but 128 in the release"
    assert capsys.readouterr().err == f"roberta_base_mnli.sh: {expected}\n"
    assert len(started) == 1


# ---- missing files ----


@pytest.mark.parametrize("nproc", [None, "two"])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data_dir", "none"], "none/SST-2/train.tsv: no such file; `python utils/download_glue"),
        (["--model_name_or_path", "./none"], "'./none': no such folder"),
        (
            ["--model_name_or_path", "bert"],
            "'bert' has model_type 'bert'; this package has only roberta, ",
        ),
        (
            ["--model_name_or_path", "{base}", "--max_seq_length", "99"],
            "--max_seq_length 99: the m",
        ),
        (["--small", "none", "bert"], "--small none: no such folder"),
        (["--small", "{base}", "none"], "--small none: no such folder"),
        (["--small", "{base}", "bert"], "bert/SST-2/train.tsv: no such file"),
        (["--small", "{base}", "bert", "--max_seq_length", "99"], "--max_seq_length 99: the model"),
    ],
)
def test_a_wrong_path_is_reported_before_a_wrong_number_of_processes(
    run_glue, started, monkeypatch, tiny_base, nproc, flags, message
):
    monkeypatch.setattr(recipe, "gpu_count", lambda: 0)
    if nproc:
        monkeypatch.setenv("NPROC", nproc)
    Path("bert").mkdir()
    Path("bert", "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(SystemExit) as ended:
        recipe.main(["roberta_base_sst2", *(flag.format(base=tiny_base) for flag in flags)])
    assert ended.value.code.startswith(f"roberta_base_sst2.sh: error: {message}")
    assert started == []


def test_models_of_the_hub_and_existing_data_are_accepted(
    run_glue, started, monkeypatch, tiny_glue
):
    monkeypatch.setenv("NPROC", "1")
    names = ["roberta-base", "microsoft/deberta-v2-xlarge"]
    for name in names:
        flags = ["--model_name_or_path", name, "--data_dir", str(tiny_glue)]
        recipe.main(["roberta_base_sst2", *flags])
    assert len(started) == len(names)


def test_the_length_is_checked_against_the_configuration_in_use(
    run_glue, started, monkeypatch, tiny_base
):
    """They may come from --config_name instead of the model."""
    monkeypatch.setenv("NPROC", "1")
    flags = ["--model_name_or_path", str(tiny_base), "--max_seq_length", "99"]
    settings = json.loads((tiny_base / "config.json").read_text())
    Path("longer").mkdir()
    Path("longer", "config.json").write_text(
        json.dumps({**settings, "max_position_embeddings": 200})
    )
    recipe.main(["roberta_base_sst2", *flags, "--config_name", "longer"])
    assert len(started) == 1
    with pytest.raises(SystemExit) as ended:
        recipe.main(["roberta_base_sst2", *flags, "--config_name", str(tiny_base)])
    assert "error: --max_seq_length 99: the model has " in ended.value.code


@pytest.mark.parametrize("shown", ["--print", "--estimate"])
def test_a_command_is_shown_even_if_its_folders_do_not_exist(started, capsys, shown):
    recipe.main(["roberta_base_sst2", "--small", "no base", "no data", shown])
    assert "--model_name_or_path 'no base'" in capsys.readouterr().out


# ---- the weights to start from ----


@pytest.mark.parametrize("name", AFTER_MNLI)
def test_the_error_about_missing_weights_names_the_script_that_writes_them(started, name):
    family = name.rsplit("_", 1)[0]
    with pytest.raises(SystemExit) as ended:
        recipe.main([name])
    message = ended.value.code
    assert message.startswith(f"{name}.sh: error: {RECIPES[name].flags['lora_path']}: no such file")
    assert f"{family}_mnli.sh makes it as output/{family}_mnli/pytorch_model_lora.bin" in message
    assert "\n" not in message
    assert started == []


@pytest.mark.parametrize("how", ["default", "variable", "flag"])
def test_weights_come_from_a_flag_a_variable_or_the_default_path(started, monkeypatch, how):
    path = {"default": "roberta_base_mnli_lora.bin"}.get(how, "elsewhere.bin")
    Path(path).touch()
    monkeypatch.setenv("NPROC", "8")
    if how == "variable":
        monkeypatch.setenv("MNLI_CHECKPOINT", path)
    recipe.main(["roberta_base_rte", *(["--lora_path", path] if how == "flag" else [])])
    words = started[0][0]
    last = len(words) - words[::-1].index("--lora_path")
    assert Path(words[last]) == Path(path)


def test_the_weights_may_be_in_the_home_folder(run_glue, started, tmp_path, monkeypatch):
    (tmp_path / "mnli.bin").touch()
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("NPROC", "8")
    recipe.main(["roberta_base_rte", "--lora_path=~/mnli.bin"])
    assert len(started) == 1
    with pytest.raises(SystemExit) as ended:
        recipe.main(["roberta_base_rte", "--lora_path=~/none.bin"])
    assert ended.value.code.endswith(f"--lora_path {tmp_path / 'none.bin'}: no such file")


@pytest.mark.parametrize("name", ["roberta_base_sst2", "roberta_base_rte"])
def test_missing_weights_of_a_flag_are_an_error(run_glue, started, name):
    with pytest.raises(SystemExit) as ended:
        recipe.main([name, "--lora_path", "none.bin"])
    assert ended.value.code == f"{name}.sh: error: --lora_path none.bin: no such file"


def test_a_full_model_is_refused_with_advice_that_works(
    started, split_lora, tiny_base, monkeypatch
):
    monkeypatch.setenv("NPROC", "1")
    settings = {"apply_lora": True, "lora_r": 8, "lora_alpha": 16}
    config = RobertaConfig.from_pretrained(tiny_base, num_labels=3, **settings)
    RobertaForSequenceClassification(config).save_pretrained("full")
    for path, message in (
        (str(tiny_base), "is a model without LoRA, but the recipe starts from LoRA weights: rob"),
        ("full/pytorch_model.bin", "full/pytorch_model.bin mnli_lora.bin takes its LoRA weights"),
    ):
        monkeypatch.setenv("MNLI_CHECKPOINT", path)
        with pytest.raises(SystemExit) as ended:
            recipe.main(["roberta_base_rte"])
        assert ended.value.code.startswith(f"roberta_base_rte.sh: error: {path}: ")
        assert message in ended.value.code
        assert started == []
    split_lora.main(["full/pytorch_model.bin", "mnli_lora.bin"])
    monkeypatch.setenv("MNLI_CHECKPOINT", "mnli_lora.bin")
    recipe.main(["roberta_base_rte"])
    assert len(started) == 1


@pytest.mark.parametrize("shape", [{"num_hidden_layers": 3}, {"hidden_size": 64}, {}])
def test_weights_of_a_model_of_another_size_are_an_error(
    run_glue, started, small_glue, tiny_base, monkeypatch, shape
):
    """The error comes before any process starts, and names where the path came from."""
    settings = {"apply_lora": True, "lora_r": 8, "lora_alpha": 16, **shape}
    config = RobertaConfig.from_pretrained(tiny_base, num_labels=3, **settings)
    path = "other.bin"
    torch.save(lora.lora_state_dict(RobertaForSequenceClassification(config)), path)
    call = ["roberta_base_rte", "--small", str(tiny_base), str(small_glue)]
    monkeypatch.setenv("MNLI_CHECKPOINT", path)
    for name, more in (("MNLI_CHECKPOINT", []), ("--lora_path", ["--lora_path", path])):
        if not shape:
            recipe.main([*call, *more])
            continue
        with pytest.raises(SystemExit) as ended:
            recipe.main([*call, *more])
        size = f"{config.num_hidden_layers} layers of width {config.hidden_size}, but"
        assert f"error: {name} {path}: is for a model with {size}" in ended.value.code
        assert ended.value.code.endswith(
            f"{tiny_base} has 2 of width 32: give LoRA weights of this base"
        )
    assert len(started) == (0 if shape else 2)


def test_other_recipes_ignore_mnli_checkpoint(started, monkeypatch):
    monkeypatch.setenv("NPROC", "8")
    monkeypatch.setenv("MNLI_CHECKPOINT", "none.bin")
    recipe.main(["roberta_base_sst2"])
    assert "--lora_path" not in started[0][0]


# ---- a few steps ----


def steps_of(folder: Path) -> int:
    return json.loads((folder / "trainer_state.json").read_text())["global_step"]


@pytest.fixture(scope="module")
def weights_for(run_glue, small_glue, tmp_path_factory):
    """Returns the LoRA weights of a recipe's trial, trained once for all tests."""
    made = {}

    def make(name: str, base: Path) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("weights") / name
            trial = recipe.small(RECIPES[name], str(base), str(small_glue))
            run_glue.main(trial.arguments(["--disable_tqdm", "--output_dir", str(made[name])]))
        return made[name] / "pytorch_model_lora.bin"

    return make


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_recipe_runs(run_glue, small_glue, weights_for, request, monkeypatch, started, name):
    base = request.getfixturevalue(SMALL_BASES[RECIPES[name].flags["model_name_or_path"]])
    for variable, value in recipe.read_environment().items():
        monkeypatch.setenv(variable, value)
    if RECIPES[name].after:
        monkeypatch.setenv("MNLI_CHECKPOINT", str(weights_for(RECIPES[name].after, base)))
    recipe.main([name, "--small", str(base), str(small_glue), "--disable_tqdm"])
    words = started[0][0]
    run_glue.main(words[words.index("--model_name_or_path") :])
    out = Path("output") / f"{name}_small"
    assert steps_of(out) == 2
    results = json.loads((out / "eval_results.json").read_text())
    assert 0 < results["eval_loss"] < 100
    assert ("eval_loss_mm" in results) == (RECIPES[name].flags["task_name"] == "mnli")


def test_a_small_run_keeps_settings_that_are_not_about_size(run_glue, monkeypatch):
    flags = "weight_decay warmup_ratio learning_rate lora_alpha per_device_train_batch_size seed"
    real = RECIPES["deberta_v2_xxlarge_mrpc"]
    for gpus in (0, 1):
        monkeypatch.setattr(recipe, "gpu_count", lambda gpus=gpus: gpus)
        before, after = (
            parsed(run_glue, entry.arguments()) for entry in (real, recipe.small(real, "b", "d"))
        )
        assert [before[flag] for flag in flags.split()] == [after[flag] for flag in flags.split()]
        assert (after["model_name_or_path"], after["data_dir"], after["max_steps"]) == ("b", "d", 2)
        assert after["fp16"] == (gpus > 0)
        assert after["lora_path"] == before["lora_path"]


@pytest.mark.slow
def test_two_recipes_from_the_command_line(tiny_base, small_glue, tmp_path):
    """MNLI on two processes, then MRPC from the weights that MNLI wrote."""
    first = run_script("roberta_base_mnli", "--small", tiny_base, small_glue, NPROC=2)
    assert first.returncode == 0, first.stderr
    assert "--nproc_per_node=2" in first.stdout
    made = tmp_path / "output" / "roberta_base_mnli_small"
    assert steps_of(made) == 2
    second = run_script(
        *("roberta_base_mrpc", "--small", tiny_base, small_glue, "--max_steps", 3),
        MNLI_CHECKPOINT=made / "pytorch_model_lora.bin",
    )
    assert second.returncode == 0, second.stderr
    assert f"tensors from {made / 'pytorch_model_lora.bin'}" in second.stderr
    out = tmp_path / "output" / "roberta_base_mrpc_small"
    assert steps_of(out) == 3
    assert "eval_combined_score" in json.loads((out / "eval_results.json").read_text())


@pytest.mark.slow
def test_an_error_from_the_command_line_is_one_line():
    result = run_script("roberta_base_rte")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert result.stderr.startswith("roberta_base_rte.sh: error: ./roberta_base_mnli_lora.bin: no")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["roberta_base_rte", "roberta_base_sst2"])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--learning_rat", "1"], "unrecognized arguments: --learning_rat 1; did you mean --learn"),
        (["--max_steps", "few"], "argument --max_steps: invalid int value: 'few'"),
        (["--task_name", "nope"], "unknown GLUE task 'nope' (known: cola, "),
        (["--report_to", "none", "tensorboard"], "report_to none: leave it out, or tensorboard"),
    ],
)
def test_a_wrong_flag_is_reported_first(name, flags, message):
    """It is reported before missing weights and GPUs, and without starting the launcher."""
    result = run_script(name, *flags)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith(f"{name}.sh: error: {message}")


@pytest.mark.slow
def test_a_closed_pipe_ends_print_without_an_error():
    python = str(Path(sys.executable).parent)
    process = subprocess.Popen(
        ["bash", NLU / "roberta_base_rte.sh", "--print"],
        env={**os.environ, "PATH": f"{python}{os.pathsep}{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == (b"", 141)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--lora_r", 4), ("--estimate",)])
def test_a_python_without_torch_is_reported(tmp_path, flags):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    environment.pop("PYTHONPATH", None)
    run = partial(subprocess.run, env=environment, capture_output=True, text=True)
    script = ["bash", NLU / "roberta_base_sst2.sh"]
    result = run([*script, *map(str, flags)])
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert result.stderr.startswith(f"roberta_base_sst2.sh: error: {sys.executable} has no torch:")
    for shown in ("--help", "--print"):
        assert run([*script, shown]).returncode == 0


@pytest.mark.slow
def test_variables_of_another_launcher_are_ignored():
    """The recipe's own launcher sets these variables again."""
    result = run_script("roberta_base_rte", "--max_steps", 3, WORLD_SIZE=2, LOCAL_RANK=1)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert result.stderr.startswith("roberta_base_rte.sh: error: ./roberta_base_mnli_lora.bin: no")


# ---- documentation ----


def readme_rows() -> dict[str, list[str]]:
    rows = re.findall(r"^\| `(\S+)\.sh` \|(.*)\|$", (NLU / "README.md").read_text("utf-8"), re.M)
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in rows}


def test_the_readme_lists_the_recipes():
    rows = readme_rows()
    assert sorted(rows) == SCRIPTS
    for name, (*_, first) in rows.items():
        after = RECIPES[name].after
        assert first == (f"`{after}.sh`" if after else ""), name


@pytest.mark.parametrize("where", ["README", "script"])
def test_the_results_equal_the_paper_s(where):
    path = FACTS / "paper_results.json"
    if not path.is_file():
        pytest.skip("the paper's figures are not on this machine")
    paper = json.loads(path.read_text())["glue_dev"]
    known = {"roberta_base": "roberta-base LoRA", "deberta_v2_xxlarge": "deberta-v2-xxlarge LoRA"}
    for name, (_, _, figure, _) in readme_rows().items():
        family, _, task = name.rpartition("_")
        expected = paper[known[family]][task] if family in known else ""
        if where == "README":
            assert figure == expected, name
        else:
            text = recipe.about(RECIPES[name])
            assert re.findall(r"Table 2: (\S+)", text) == ([expected] if expected else []), name
