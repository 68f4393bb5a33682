# SPDX-License-Identifier: Apache-2.0
"""Documents to train on: English prose that ships with Python, or a file of the user's."""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from megatron.linear_cp.data import PackedBatch, pack_sequences

VOCAB_SIZE = 256
MIN_PARAGRAPH_TOKENS = 64


def load_documents(path: str | None) -> list[torch.Tensor]:
    """Byte tokens of every document, in the file's order.

    Args:
        path: a Megatron-style ``.jsonl`` (one ``{"text": ...}`` per line, one document each), any
            other file as plain text (paragraphs, short ones joined to the next), or None for the
            topics of Python's own help.

    Raises:
        ValueError: a missing, unreadable or empty file, malformed JSON, or a document shorter than
            two tokens; the message names the file and the line.
    """
    if path is None:
        # Imported here: only the default text needs it.
        from pydoc_data.topics import topics

        return [_tokens(text) for _, text in sorted(topics.items())]
    file = Path(path)
    try:
        if not file.exists():
            raise ValueError(f"{path}: no such file; DATA must name a .txt or .jsonl file")
        if not file.is_file():
            raise ValueError(f"{path}: not a regular file; DATA must name a .txt or .jsonl file")
        content = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    if not content.strip():
        raise ValueError(f"{path}: the file is empty; nothing to train on")
    return (
        _json_lines(path, content)
        if file.suffix.lower() == ".jsonl"
        else _paragraphs(path, content)
    )


def packed_batches(
    documents: Sequence[torch.Tensor], *, row_tokens: int, multiple_of: int, seed: int
) -> Iterator[PackedBatch]:
    """Endless packed rows of whole or cut documents, every token used once per pass.

    A document longer than what is left of a row continues in the next one as a document of its own.

    Args:
        documents: token ids, each of at least two.
        row_tokens: stored tokens of a row, padding included; a multiple of ``multiple_of``.
        multiple_of: what every stored length must divide by.
        seed: of the order of documents.
    """
    order = random.Random(seed)
    row: list[torch.Tensor] = []
    room = row_tokens
    while True:
        for i in order.sample(range(len(documents)), len(documents)):
            rest = documents[i]
            while len(rest) >= 2:
                piece = rest[:room]
                # A last token alone would have nothing to predict: leave it a companion.
                if len(rest) - len(piece) == 1 and len(piece) > 2:
                    piece = piece[:-1]
                row.append(piece)
                rest = rest[len(piece) :]
                room -= -(-len(piece) // multiple_of) * multiple_of
                if room < multiple_of:
                    yield pack_sequences(row, multiple_of=multiple_of)
                    row, room = [], row_tokens


def _tokens(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode("utf-8")), dtype=torch.int64)


def _json_lines(path: str, content: str) -> list[torch.Tensor]:
    documents = []
    # Not splitlines: JSON strings may hold U+2028 and the like as they are.
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", str(error))
            raise ValueError(f"{path}, line {number}: malformed JSON ({reason})") from None
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            raise ValueError(f'{path}, line {number}: expected an object with a string "text"')
        try:
            tokens = _tokens(record["text"])
        except UnicodeEncodeError:
            raise ValueError(f"{path}, line {number}: text with half a character") from None
        documents.append(_checked(tokens, f"{path}, line {number}"))
    return documents


def _paragraphs(path: str, content: str) -> list[torch.Tensor]:
    """Blank lines part paragraphs; one too short to learn from is joined to the next."""
    pieces: list[str] = []
    pending = ""
    for block in content.replace("\r\n", "\n").split("\n\n"):
        pending = f"{pending}\n\n{block}" if pending else block
        if len(pending.encode()) >= MIN_PARAGRAPH_TOKENS:
            pieces.append(pending)
            pending = ""
    if pending.strip():
        if pieces:
            pieces[-1] += f"\n\n{pending}"
        else:
            pieces.append(pending)
    return [_checked(_tokens(piece), path) for piece in pieces]


def _checked(tokens: torch.Tensor, where: str) -> torch.Tensor:
    if len(tokens) < 2:
        raise ValueError(
            f"{where}: a document of {len(tokens)} token (one byte is one token); training needs "
            "at least two"
        )
    return tokens
