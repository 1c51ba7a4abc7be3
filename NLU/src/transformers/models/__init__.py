"""One folder per model family. Importing a family here registers it; there is no other list."""

from .roberta import family as _roberta  # noqa: F401, I001 - messages list them in this order
from .deberta_v2 import family as _deberta_v2  # noqa: F401
