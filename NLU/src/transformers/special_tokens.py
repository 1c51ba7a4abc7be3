"""`SpecialTokensMixin`: the roles of special tokens, and how tokens are added to a vocabulary."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken

Token = str | AddedToken

# The roles that are each held by one token.
ROLES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
ADDITIONAL = "additional_special_tokens"


def text_of(token: Token | None) -> str | None:
    """Returns a token's text."""
    return token.content if isinstance(token, AddedToken) else token


def flags_of(token: AddedToken) -> dict[str, Any]:
    """Returns an added token as files store it: its text, and its flags, such as for spaces."""
    return {
        "content": token.content,
        "lstrip": token.lstrip,
        "normalized": token.normalized,
        "rstrip": token.rstrip,
        "single_word": token.single_word,
    }


def as_special(token: Token) -> AddedToken:
    """Returns the token, marked as special."""
    if isinstance(token, str):
        return AddedToken(token, special=True)
    return AddedToken(**flags_of(token), special=True)


def _role(name: str) -> property:
    def get(self: "SpecialTokensMixin") -> str | None:
        return text_of(getattr(self, f"_{name}"))

    def set_(self: "SpecialTokensMixin", token: Token | None) -> None:
        if token is not None:
            _check_token(name, token)
        setattr(self, f"_{name}", token)
        self._role_changed(name)

    return property(get, set_, doc="The token of this role as a string, None for none.")


def _role_id(name: str) -> property:
    def get(self: "SpecialTokensMixin") -> int | None:
        token = getattr(self, name)
        if token is None:
            return None
        index = self._token_to_id(token)
        if index is None:
            raise ValueError(
                f"{name} {token!r} is not in the vocabulary: "
                f"add it by tokenizer.add_special_tokens({{{name!r}: {token!r}}})"
            )
        return index

    def set_(self: "SpecialTokensMixin", index: int | None) -> None:
        setattr(self, name, None if index is None else self.convert_ids_to_tokens(index))

    return property(get, set_, doc=f"The id of `{name}`, None where there is none.")


class SpecialTokensMixin:
    """A tokenizer's special tokens.

    A role is set to a string, or to an `AddedToken`, which says which spaces the token absorbs. It
    is read as a string. Setting a role does not add the token; `add_special_tokens` does.
    """

    SPECIAL_TOKENS_ATTRIBUTES: Sequence[str] = (*ROLES, ADDITIONAL)

    bos_token = _role("bos_token")
    eos_token = _role("eos_token")
    unk_token = _role("unk_token")
    sep_token = _role("sep_token")
    pad_token = _role("pad_token")
    cls_token = _role("cls_token")
    mask_token = _role("mask_token")

    bos_token_id = _role_id("bos_token")
    eos_token_id = _role_id("eos_token")
    unk_token_id = _role_id("unk_token")
    sep_token_id = _role_id("sep_token")
    pad_token_id = _role_id("pad_token")
    cls_token_id = _role_id("cls_token")
    mask_token_id = _role_id("mask_token")

    pad_token_type_id = 0

    _additional_special_tokens: list[Token]

    @property
    def additional_special_tokens(self) -> list[str]:
        """Special tokens without a role of their own, as a new list."""
        return [text_of(token) for token in self._additional_special_tokens]

    @additional_special_tokens.setter
    def additional_special_tokens(self, tokens: Iterable[Token] | None) -> None:
        self._additional_special_tokens = _several(ADDITIONAL, tokens or ())
        self._role_changed(ADDITIONAL)

    @property
    def additional_special_tokens_ids(self) -> list[int]:
        """The ids of `additional_special_tokens`."""
        return self.convert_tokens_to_ids(self.additional_special_tokens)

    @additional_special_tokens_ids.setter
    def additional_special_tokens_ids(self, ids: Sequence[int]) -> None:
        self.additional_special_tokens = self.convert_ids_to_tokens(list(ids))

    @property
    def special_tokens_map_extended(self) -> dict[str, Token | list[Token]]:
        """The special tokens by role, as they were given; roles without a token are left out."""
        roles = {name: getattr(self, f"_{name}") for name in (*ROLES, ADDITIONAL)}
        return {name: token for name, token in roles.items() if token}

    @property
    def special_tokens_map(self) -> dict[str, str | list[str]]:
        """The special tokens by role, as strings; roles without a token are left out."""
        return {name: getattr(self, name) for name in self.special_tokens_map_extended}

    @property
    def all_special_tokens_extended(self) -> list[Token]:
        """The special tokens, each once, as they were given."""
        roles = self.special_tokens_map_extended
        additional = roles.pop(ADDITIONAL, [])
        tokens: dict[str, Token] = {}
        for token in [*roles.values(), *additional]:
            tokens.setdefault(text_of(token), token)
        return list(tokens.values())

    @property
    def all_special_tokens(self) -> list[str]:
        """The special tokens, each once, as strings."""
        roles = [getattr(self, name) for name in ROLES]
        return list(dict.fromkeys(filter(None, [*roles, *self.additional_special_tokens])))

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of `all_special_tokens`."""
        return self.convert_tokens_to_ids(self.all_special_tokens)

    # -- Adding tokens -----------------------------------------------------------------------------

    def add_tokens(self, new_tokens: Token | Iterable[Token], special_tokens: bool = False) -> int:
        """Adds tokens that are never split; call `resize_token_embeddings` of the model afterwards.

        Args:
            new_tokens: one token or several; those that the vocabulary has keep their ids.
            special_tokens: never lower-case them. A tokenizer over a backend of the `tokenizers`
                package also leaves them out with ``skip_special_tokens``.

        Returns:
            How many tokens were new to the vocabulary.

        Raises:
            TypeError: something is not a token.
        """
        tokens = [new_tokens] if isinstance(new_tokens, Token) else new_tokens
        before = len(self)
        kept = [token for token in _several("new_tokens", tokens) if text_of(token)]
        if kept:
            self._add(kept, special_tokens)
        return len(self) - before

    def add_special_tokens(self, special_tokens_dict: Mapping[str, Any]) -> int:
        """Gives tokens their roles, and adds those that the vocabulary does not have.

        Args:
            special_tokens_dict: role -> token; "additional_special_tokens" -> a list of tokens,
                which replaces the earlier ones.

        Returns:
            How many tokens were new to the vocabulary.

        Raises:
            TypeError: something is not a token.
            ValueError: a role does not exist.
        """
        unknown = special_tokens_dict.keys() - {*ROLES, ADDITIONAL}
        if unknown:
            raise ValueError(
                f"{sorted(unknown)[0]!r} is not a special token's role: {', '.join(ROLES)} or "
                f"{ADDITIONAL}"
            )
        added = 0
        for role, value in special_tokens_dict.items():
            tokens = _several(role, value if role == ADDITIONAL else [value])
            added += self.add_tokens(tokens, special_tokens=True)
            setattr(self, role, tokens if role == ADDITIONAL else value)
        return added

    def sanitize_special_tokens(self) -> int:
        """Adds the special tokens that the vocabulary does not have; returns how many."""
        return self.add_tokens(self.all_special_tokens_extended, special_tokens=True)

    def _role_changed(self, name: str) -> None:
        """Reacts to a role that was set, maybe before there is a vocabulary."""

    @abstractmethod
    def _add(self, tokens: list[Token], special: bool) -> None:
        """Adds tokens to the vocabulary, except those that it already has."""

    @abstractmethod
    def _token_to_id(self, token: str) -> int | None: ...

    @abstractmethod
    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Returns the id of a token, or of each of several."""

    @abstractmethod
    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        """Returns the token of an id, or of each of several."""

    @abstractmethod
    def __len__(self) -> int: ...


def _several(name: str, tokens: Iterable[Token]) -> list[Token]:
    """Checks tokens, and returns them as a list."""
    if isinstance(tokens, Token) or not isinstance(tokens, Iterable):
        raise TypeError(f"{name} is a list of tokens, not {type(tokens).__name__} ({tokens!r:.40})")
    tokens = list(tokens)
    for token in tokens:
        _check_token(name, token)
    return tokens


def _check_token(name: str, token: Any) -> None:
    if not isinstance(token, Token):
        raise TypeError(
            f"{name}: a token is a string or an AddedToken, not {type(token).__name__} "
            f"({token!r:.40})"
        )
