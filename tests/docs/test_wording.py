"""The words that the project gave up for those of the field do not come back: in code, docs, tests and configs."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
FOLDERS = ("src", "docs", "tests", "examples", "bench", "tools")
SUFFIXES = frozenset({".py", ".md", ".toml", ".txt", ".sh"})

# What stood there, as a pattern over text in which line breaks are spaces; and what to say instead.
SAY_INSTEAD = {
    r"goes(?: |_)on\b": "resumes, continues",
    r"\bpassed(?: |_)over\b": "skipped",
    r"as often as pays": "interval: auto",
    r"\blet[ _]go\b": "released, freed",
    r"\baloud\b": "reported, with a warning",
    r"\bwas_to\b": "expected",
    r"\bnearly over\b": "walltime limit in 120 s",
    r"loss is no number": "loss is NaN",
    r"every byte proven": "all checksums verified",
    r"system refused": "an I/O error",
    r"storage refused to": "could not",
    r"nothing of that name differs": "had no effect",
    r"saving less often would not": "raise save_steps to avoid this",
    r"of them blocked": "training paused",
    r"where nodes without numbers meet": "rendezvous endpoint",
    r"so many times at most": "at most N times",
    r"nobody is listened to": "off by default",
}
# The journals of an old release and the note that lists them.
EXEMPT = ("tests/docs/test_wording.py", "tests/format/golden/", "docs/decisions/018-names-on-disk.md")


def _texts() -> list[tuple[str, str]]:
    paths = [path for folder in FOLDERS for path in sorted((REPOSITORY / folder).rglob("*"))]
    paths += sorted(REPOSITORY.glob("*.md"))
    names = {str(path.relative_to(REPOSITORY)): path for path in paths if path.suffix in SUFFIXES and path.is_file()}
    return [(name, path.read_text()) for name, path in names.items() if not name.startswith(EXEMPT)]


def test_words_that_were_given_up_stay_out() -> None:
    found = []
    for name, text in _texts():
        plain = text.lower()
        likely = {pattern: better for pattern, better in SAY_INSTEAD.items() if _longest_word(pattern) in plain}
        # A sentence that is wrapped, in a comment too, is one line; no place moves.
        flat = re.sub(r"\n[ #]*", lambda match: " " * len(match[0]), plain) if likely else ""
        for pattern, better in likely.items():
            for match in re.finditer(pattern.replace(" ", r"\s+"), flat):
                line = text.count("\n", 0, match.start()) + 1
                found.append(f"{name}:{line}: {match[0]!r}; say: {better}")
    assert not found, "\n".join(found)


def _longest_word(pattern: str) -> str:
    words: list[str] = re.findall(r"[a-z]{2,}", pattern)
    return max(words, key=len)


def test_names_of_tests_are_plain_sentences() -> None:
    tests = ((name, text) for name, text in _texts() if name.startswith("tests/"))
    found = [(name, each) for name, text in tests for each in re.findall(r"^ *def (test_\w+)", text, re.MULTILINE)]
    riddles = [f"{name}: {each}" for name, each in found if re.search(r"nobody|somebody|_(?:told|said)(?:_|$)", each)]
    assert not riddles, "\n".join(riddles)
