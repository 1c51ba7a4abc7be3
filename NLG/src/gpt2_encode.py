"""Encodes a formatted corpus as token ids: rows {"context": [ids], "completion": [ids]}.

    python src/gpt2_encode.py --vocab vocab --input data/e2e/train_formatted.jsonl \\
        --output data/e2e/train.jsonl --add_bos --add_eos

The completion is encoded with a space before it. With --add_bos the context ends in
<|endoftext|>, which marks where the completion begins. With --add_eos the completion ends in it.
"""

from collections.abc import Iterator

from tqdm.auto import tqdm

from encoded import END_OF_TEXT_ID
from encoder import VOCAB_HELP, Encoder, get_encoder
from formatted import Row, read_formatted
from json_lines import write_json_lines
from loralib.io.atomic import check_apart
from loralib.io.command_line import ArgumentParser
from script import run

BATCH = 1024  # rows that are encoded at once


def encode_rows(
    rows: list[Row], encoder: Encoder, *, add_bos: bool, add_eos: bool
) -> Iterator[dict[str, list[int]]]:
    """Yields the token ids of formatted rows.

    Args:
        rows: the rows, as `read_formatted` returns them.
        encoder: the encoder of the vocabulary.
        add_bos: whether <|endoftext|> is put after each context.
        add_eos: whether <|endoftext|> is put after each completion.
    """
    after_context = [END_OF_TEXT_ID] * add_bos
    after_completion = [END_OF_TEXT_ID] * add_eos
    for start in range(0, len(rows), BATCH):
        batch = rows[start : start + BATCH]
        contexts = encoder.encode_batch([row["context"] for row in batch])
        completions = encoder.encode_batch([" " + row["completion"] for row in batch])
        for context, completion in zip(contexts, completions, strict=True):
            yield {
                "context": context + after_context,
                "completion": completion + after_completion,
            }


def main(argv: list[str] | None = None) -> None:
    """Parses the command line and encodes.

    Raises:
        OSError, ValueError: a file cannot be read, or is not in its format; nothing is written
            then.
    """
    parser = ArgumentParser(description="Turn a formatted corpus into token ids.")
    parser.add_argument("--input", required=True, help="formatted file, JSON lines")
    parser.add_argument("--vocab", required=True, help=VOCAB_HELP)
    parser.add_argument("--output", required=True, help="file of token ids to write, JSON lines")
    parser.add_argument("--add_bos", action="store_true", help="end contexts in <|endoftext|>")
    parser.add_argument("--add_eos", action="store_true", help="end completions in <|endoftext|>")
    args = parser.parse_args(argv)
    check_apart([args.output], [args.input])
    rows = read_formatted(args.input)
    encoder = get_encoder(args.vocab)
    encoded = encode_rows(rows, encoder, add_bos=args.add_bos, add_eos=args.add_eos)
    bar = tqdm(encoded, total=len(rows), desc="encode", unit="row", disable=None)
    write_json_lines(args.output, bar)


if __name__ == "__main__":
    run(main)
