"""Gets, replaces and resizes a model's word embeddings, and ties parameters to each other.

ids ── input embeddings (rows, hidden) ─> …… hidden ── output embeddings, the same rows ─> logits
"""

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

# The end of the name of the weight that a language-model head's projection is tied to.
_WORDS = "embeddings.word_embeddings.weight"


class TokenEmbeddingsMixin:
    """Upstream's methods for word embeddings; a mix-in for `PreTrainedModel`.

    Class attributes:
        tied_weights: a tied parameter's name -> the name of the parameter that it is tied to.
    """

    tied_weights: ClassVar[Mapping[str, str]] = {}

    # ---- which modules ----

    def get_input_embeddings(self) -> nn.Embedding:
        """Returns the word embeddings."""
        return self.base_model.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the word embeddings, and ties the parameters that are tied to them again."""
        self.base_model.embeddings.word_embeddings = value
        self._forget_base()
        self.tie_weights()

    def get_output_embeddings(self) -> nn.Linear | None:
        """Returns the projection to the vocabulary; None if the model has none."""
        name = self._output_name()
        return None if name is None else self.get_submodule(name)

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replaces the projection to the vocabulary, and the head's bias by the projection's.

        If the projection is tied, `tie_weights` gives it the word embeddings' weight again.

        Raises:
            ValueError: the model has none.
        """
        name = self._output_name()
        if name is None:
            raise ValueError(f"{type(self).__name__} has no output embeddings to be replaced")
        self._replace(name, new_embeddings)
        if getattr(new_embeddings, "bias", None) is not None:
            bias = f"{name}.bias"
            self._replace(self.tied_weights.get(bias, bias), new_embeddings.bias)

    def _output_name(self) -> str | None:
        for name, source in self.tied_weights.items():
            if source.endswith(_WORDS):
                return name.rpartition(".")[0]
        return None

    # ---- what is tied ----

    @property
    def tied(self) -> dict[str, str]:
        """The `tied_weights` that share one tensor, as the settings say."""
        if self.config.tie_word_embeddings and not self.config.torchscript:
            return dict(self.tied_weights)
        return {name: kept for name, kept in self.tied_weights.items() if not kept.endswith(_WORDS)}

    @property
    def cloned(self) -> dict[str, str]:
        """The `tied_weights` that are copies, since a traced graph cannot hold a tensor twice."""
        if not (self.config.tie_word_embeddings and self.config.torchscript):
            return {}
        return {name: kept for name, kept in self.tied_weights.items() if name not in self.tied}

    def tie_weights(self) -> None:
        """Replaces every tied parameter by the tensor that it is tied to.

        The vocabulary's bias gets as many elements as the vocabulary has rows; new ones are zero.
        """
        for name, source in self.cloned.items():
            tensor = self.get_parameter(source)
            self._replace(name, _parameter_like(tensor, tensor.detach().clone()))
        for name, source in self.tied.items():
            if source.endswith(_WORDS):
                self._replace(name, self.get_parameter(source))
        self._fit_output()
        for name, source in self.tied.items():
            self._replace(name, self.get_parameter(source))

    def note_untied(self) -> None:
        """Turns `config.tie_word_embeddings` off if the projection has other values than the words.

        An adapter whose projection was trained on its own gives the model such a one. With the
        setting as it was, files would not hold it.
        """
        for name, source in self.tied.items():
            tied, words = self.get_parameter(name), self.get_parameter(source)
            if source.endswith(_WORDS) and tied is not words and not torch.equal(tied, words):
                self.config = copy.copy(self.config)  # another model may have the same object
                self.config.tie_word_embeddings = False
                return

    def _fit_output(self) -> None:
        """Fits the output embeddings' bias, in_features and out_features to their weight."""
        name, output = self._output_name(), self.get_output_embeddings()
        if name is None or not isinstance(output, nn.Linear):
            return
        output.out_features, output.in_features = output.weight.shape
        source = self.tied_weights.get(f"{name}.bias", f"{name}.bias")
        bias = self.get_parameter(source)
        if len(bias) != output.out_features:
            fitted = bias.new_zeros(output.out_features)
            count = min(len(bias), len(fitted))
            fitted[:count] = bias.detach()[:count]
            self._replace(source, _parameter_like(bias, fitted))

    def _replace(self, name: str, new: nn.Module | nn.Parameter) -> None:
        owner, _, attribute = name.rpartition(".")
        setattr(self.get_submodule(owner), attribute, new)

    # ---- more or fewer rows ----

    def resize_token_embeddings(self, new_num_tokens: int | None = None) -> nn.Embedding:
        """Changes the number of rows of the word embeddings, and of the projection and its bias.

        The first rows keep their values. New ones are initialized as in a new model, and are frozen
        if the others are. `config.vocab_size` is updated.

        Args:
            new_num_tokens: the number of rows; None changes nothing.

        Returns:
            The word embeddings.

        Raises:
            ValueError: there would be no row for the padding token.
        """
        old = self.get_input_embeddings()
        if new_num_tokens is None or new_num_tokens == old.num_embeddings:
            return old
        if new_num_tokens <= self.config.pad_token_id:
            raise ValueError(
                f"resize_token_embeddings({new_num_tokens}): the padding token, "
                f"{self.config.pad_token_id}, would have no row"
            )
        new = nn.Embedding(
            new_num_tokens,
            old.embedding_dim,
            padding_idx=old.padding_idx,
            device=old.weight.device,
            dtype=old.weight.dtype,
        )
        self._init_weights(new)
        new.weight = _parameter_like(old.weight, _with_first_rows_of(old.weight, new.weight))
        self.base_model.embeddings.word_embeddings = new.train(old.training)
        self._resize_untied_output(new_num_tokens)
        for config in {id(c): c for c in map(_config_of, self.modules()) if c is not None}.values():
            config.vocab_size = new_num_tokens
        self._forget_base()
        self.tie_weights()
        return new

    def _resize_untied_output(self, rows: int) -> None:
        name, output = self._output_name(), self.get_output_embeddings()
        if name is None or output is None or f"{name}.weight" in {**self.tied, **self.cloned}:
            return
        fresh = nn.Linear(output.weight.shape[1], rows, bias=False).to(output.weight)
        self._init_weights(fresh)
        output.weight = _parameter_like(
            output.weight, _with_first_rows_of(output.weight, fresh.weight)
        )

    def _forget_base(self) -> None:
        """Forgets the base's fingerprint: the base was changed, so adapters must not record it."""
        self.base_fingerprint = self.base_model.base_fingerprint = None


def _parameter_like(old: nn.Parameter, values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=old.requires_grad)


def _with_first_rows_of(old: Tensor, new: Tensor) -> Tensor:
    """Returns new rows, with the old rows' values in the first ones."""
    values, count = new.detach().clone(), min(len(old), len(new))
    values[:count] = old.detach()[:count]
    return values


def _config_of(module: nn.Module) -> Any:
    config = vars(module).get("config")
    return config if hasattr(config, "vocab_size") else None
