"""The package's public names, and what is imported for them."""

import ast
import importlib
import inspect
import json
import os
from pathlib import Path

import pytest
from launches import fork_server

import transformers
from transformers import activations
from transformers.utils import check_min_version

ROOT = Path(__file__).resolve().parents[2]
# Installed libraries that are slow to import. --help and errors in flags do not need them.
HEAVY = {"datasets", "pandas", "pyarrow", "scipy", "sklearn", "sympy", "torch._dynamo"}
LIST_MODULES = "import json, sys; print(json.dumps(sorted(sys.modules)))"


def run_python(code):
    """Runs code in a process in which nothing but PyTorch has been imported."""
    return fork_server("torch").run(["-c", code], os.environ, 60)


def modules_after(statement):
    """The names in `sys.modules` once such a process has run a statement."""
    done = run_python(f"{statement}\n{LIST_MODULES}")
    return set(json.loads(done.stdout.splitlines()[-1]))


def imports_for_type_checkers():
    """Name -> module, of the imports under TYPE_CHECKING."""
    tree = ast.parse(Path(transformers.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    return {
        alias.name: "." * node.level + node.module for node in block.body for alias in node.names
    }


# ---- public names ----


def test_type_checkers_and_python_have_the_same_names():
    assert imports_for_type_checkers() == transformers._MODULE_OF


@pytest.mark.parametrize("name", transformers.__all__)
def test_public_names_can_be_imported_and_are_listed(name):
    assert getattr(transformers, name) is not None
    assert name in dir(transformers)


def test_a_star_import_brings_all_public_names():
    names = {}
    exec("from transformers import *", names)
    assert set(transformers.__all__) <= names.keys()


def test_a_name_that_is_not_included_is_a_clear_error():
    with pytest.raises(AttributeError, match="does not include 'BertModel'; for the full package"):
        _ = transformers.BertModel
    with pytest.raises(ImportError, match="BertModel"):
        from transformers import BertModel  # noqa: F401
    assert not hasattr(transformers, "__no_such_thing__")


NAMES_OF_PACKAGES = {
    "transformers.models.roberta": ["RobertaConfig", "RobertaForMaskedLM", "RobertaTokenizerFast"],
    "transformers.models.deberta_v2": ["DebertaV2Model", "DebertaV2TokenizerFast"],
    "transformers.models.auto": ["AutoConfig", "AutoModel", "AutoTokenizer", "MODEL_MAPPING"],
}


@pytest.mark.parametrize(("package", "names"), NAMES_OF_PACKAGES.items())
def test_packages_of_models_have_their_public_names(package, names):
    module = importlib.import_module(package)
    for name in names:
        assert getattr(module, name) is getattr(transformers, name)
    for other in ("BertModel", "Trainer"):
        with pytest.raises(AttributeError, match=f"'{package}' has no attribute '{other}'"):
            getattr(module, other)


def test_activations_have_upstream_s_names():
    for name in ("gelu", "gelu_new", "gelu_fast", "mish"):
        assert getattr(activations, name) is activations.ACT2FN[name]


def test_check_min_version_refuses_later_versions():
    check_min_version("4.4.0")
    check_min_version("4.4.2")
    for later in ("4.5.0.dev0", "5.0"):
        with pytest.raises(ImportError, match=f"needs transformers {later}, and 4.4.2") as raised:
            check_min_version(later)
        assert "\n" not in str(raised.value)


PATHS = [
    "trainer.Trainer",
    "modeling_utils.PreTrainedModel",
    "models.roberta.modeling_roberta.RobertaModel",
    "models.auto.configuration_auto.AutoConfig",
    "data.metrics.glue_compute_metrics",
    "utils.logging.get_logger",
]


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_submodules_are_attributes_of_the_package(path):
    done = run_python(f"import transformers; print(transformers.{path}.__name__)")
    assert done.stdout == f"{path.rpartition('.')[2]}\n", done.stderr


# ---- what is imported, and when ----


@pytest.mark.slow
def test_importing_the_package_imports_no_model():
    modules = modules_after("import transformers")
    assert not {*HEAVY, "tokenizers", "safetensors"} & modules
    parts = ("configuration", "modeling", "tokenization")
    assert not {name for name in modules if name.rpartition(".")[2].startswith(parts)}


@pytest.mark.slow
def test_importing_the_package_registers_its_families():
    """Their adapters are then recognized, whatever else has been imported."""
    code = "import transformers; from loralib.adapters.families import registered; "
    code += "print([family.name for family in registered()])"
    done = run_python(code)
    assert done.stdout == "['roberta', 'deberta-v2']\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        "text-classification/run_glue.py",
        "language-modeling/run_mlm.py",
        "token-classification/run_ner.py",
        "question-answering/run_qa.py",
        "multiple-choice/run_swag.py",
    ],
)
def test_wrong_flags_need_no_heavy_imports(script):
    """Nor does --help, of which test_process.py has the test."""
    path = ROOT / "examples" / script
    modules = modules_after(
        "import runpy, sys, contextlib, io\n"
        f"sys.argv = {[str(path), '--no_such_flag']}\n"
        "with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):\n"
        f"    runpy.run_path({str(path)!r}, run_name='__main__')"
    )
    assert "transformers.training_args" in modules
    assert not HEAVY & modules


@pytest.mark.slow
def test_a_model_is_read_and_trained_without_heavy_imports(tiny_base):
    modules = modules_after(
        "import torch\n"
        "from transformers import AdamW, AutoModelForSequenceClassification\n"
        "model = AutoModelForSequenceClassification.from_pretrained(\n"
        f"    {str(tiny_base)!r}, apply_lora=True, lora_r=2, lora_alpha=4)\n"
        "ids = torch.tensor([[0, 5, 2]])\n"
        "optimizer = AdamW(model.parameters())\n"
        "model(ids, labels=torch.tensor([1])).loss.backward()\n"
        "optimizer.step()"
    )
    assert "transformers.models.roberta.modeling_roberta" in modules
    assert not HEAVY & modules


@pytest.mark.parametrize("name", ["RobertaConfig", "DebertaV2Config"])
def test_configs_take_settings_in_upstreams_order(name):
    """Code that gives them by position, as upstream allows, means the same here."""
    places = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    places += ("intermediate_size", "hidden_act", "hidden_dropout_prob")
    places += ("attention_probs_dropout_prob", "max_position_embeddings")
    places += ("type_vocab_size", "initializer_range", "layer_norm_eps")
    parameters = list(inspect.signature(getattr(transformers, name)).parameters)
    assert parameters[: len(places)] == list(places)
    config = getattr(transformers, name)(100, 32, 2, 4, 64, "relu", 0.0, 0.0, 60, 1)
    assert (config.hidden_act, config.max_position_embeddings) == ("relu", 60)
    assert config.type_vocab_size == 1
