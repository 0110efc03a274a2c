"""A corpus of plain text: tokenized on first use, into the cache.

The name of the shards is a digest of the documents, the tokenizer and the options, so changed text is new data, and
unchanged text is never tokenized twice. The result is a corpus like any other, with the same guarantees.
"""

from pathlib import Path

from unbroken.data.corpus.catalogue import Corpus, open_corpus
from unbroken.data.corpus.shards import digest_file
from unbroken.data.ingest.encoders import find_tokenizer, load_encoder
from unbroken.data.ingest.request import TokenizeOptions, TokenizeRequest
from unbroken.data.ingest.sources import find_sources
from unbroken.data.ingest.tokenize import tokenize
from unbroken.store.digest import digest_of

_PATIENCE_S = 3600.0


def open_text_corpus(
    path: Path | str,
    split: str,
    tokenizer: str,
    cache_dir: Path | str,
    *,
    text_field: str = "text",
    num_workers: int = 0,
    accelerate: bool = True,
) -> Corpus:
    """The documents under ``path/split`` as a corpus; several processes may open the same one at once.

    Raises:
        PathMissing: the folder does not exist.
        NoTextFound: it holds no documents.
        DataError: documents cannot be used; see ``tokenize``.
        UsageError: the tokenizer cannot be used.
        StorageFailed: an I/O error.
    """
    path, cache_dir = Path(path), Path(cache_dir)
    folder = path / split
    identity = load_encoder(find_tokenizer(tokenizer)).identity
    options = TokenizeOptions(text_field=text_field)
    rows = [f"{identity.digest} {identity.eod_id} {text_field}\n"]
    rows += [
        f"{source.name} {source.size_bytes} {digest_file((folder / source.name).resolve()).whole}\n"
        for source in find_sources(folder).sources
    ]
    home = cache_dir / "text" / digest_of([row.encode() for row in rows]).whole
    tokenize(
        TokenizeRequest(
            input_dir=folder,
            output_dir=home / split,
            tokenizer=tokenizer,
            options=options,
            num_workers=num_workers,
            accelerate=accelerate,
            patience_seconds=_PATIENCE_S,
        )
    )
    return open_corpus(home, split)
