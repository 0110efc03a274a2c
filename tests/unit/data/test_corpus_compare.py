"""Whether the data is what a run was trained on: one verdict for each thing that can happen to a shard."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.data.making import BYTES, make_bucket, make_shard
from unbroken.data import open_corpus, seal_shards
from unbroken.data.corpus.compare import Changes, compare, from_json, recorded, to_json
from unbroken.data.corpus.listing import LISTING
from unbroken.errors import DataDamaged
from unbroken.errors.data import ServedShare
from unbroken.store.fields import Malformed

WEB = {"a": [[1, 2, 256]], "b": [[3, 256], [4, 5, 6, 256]], "c": [[7, 256]]}
CODE = {"a": [[9, 9, 9, 9, 256]]}


def served(bucket: str, name: str) -> ServedShare:
    return "all" if (bucket, name) == ("web", "a") else "some" if bucket == "web" else "none"


class Trained:
    """A run that knows its data, and the folder that is changed behind its back."""

    def __init__(self, data: Path, *, is_sealed: bool) -> None:
        self.data = data
        self.web = data / "train" / "web"
        self.is_sealed = is_sealed
        make_bucket(self.web, WEB)
        make_bucket(data / "train" / "code", CODE)
        self._unseal()
        self._seal()
        # Through JSON, as a checkpoint carries it.
        self.known = from_json(json.loads(json.dumps(to_json(recorded(open_corpus(data).shards)))))

    def _unseal(self) -> None:
        (self.web / LISTING).unlink(missing_ok=True)

    def _seal(self) -> None:
        if self.is_sealed:
            seal_shards(self.web, BYTES)

    def after(self, change: Callable[[Path], object], *, is_listed_anew: bool = True, check: str = "quick") -> Changes:
        """The verdict after a change; ``is_listed_anew`` where whoever made it wrote a new list."""
        change(self.web)
        if is_listed_anew:
            self._unseal()
            self._seal()
        return compare(self.known, open_corpus(self.data, check="full" if check == "full" else "quick"), served)


@pytest.fixture(params=[True, False], ids=["sealed", "without a list"])
def trained(request: pytest.FixtureRequest, tmp_path: Path) -> Trained:
    return Trained(tmp_path, is_sealed=request.param)


@pytest.fixture
def sealed(tmp_path: Path) -> Trained:
    return Trained(tmp_path, is_sealed=True)


def flip(web: Path) -> None:
    content = bytearray((web / "b.bin").read_bytes())
    content[0] ^= 1
    (web / "b.bin").write_bytes(content)


def move(web: Path, name: str, other: str) -> None:
    for suffix in ("bin", "idx"):
        (web / f"{name}.{suffix}").rename(web / f"{other}.{suffix}")


def swap(web: Path) -> None:
    move(web, "a", "x")
    move(web, "b", "a")
    move(web, "x", "b")


def lines(changes: Changes) -> list[str]:
    return list(changes.as_error(Path("data")).details())


@pytest.mark.parametrize("check", ["quick", "full"])
def test_untouched_data_is_the_same(trained: Trained, check: str) -> None:
    changes = trained.after(lambda web: None, is_listed_anew=False, check=check)
    assert not changes
    assert not changes.is_growth


@pytest.mark.parametrize("check", ["quick", "full"])
def test_a_touch_is_no_change(trained: Trained, check: str) -> None:
    assert not trained.after(lambda web: os.utime(web / "b.bin", (1, 1)), is_listed_anew=False, check=check)


def test_another_document_is_a_change_of_that_shard(trained: Trained) -> None:
    changes = trained.after(lambda web: make_shard(web, "b", [[3, 256], [4, 5, 256]]))
    (line,) = lines(changes)
    assert line.startswith("web/b:") and "5 tokens" in line and "6 tokens" in line
    assert not changes.is_growth


def test_wider_ids_are_a_change(trained: Trained) -> None:
    make_shard(trained.web, "a", WEB["a"], token_bytes=4)
    for name in ("b", "c"):
        make_shard(trained.web, name, WEB[name], token_bytes=4)
    make_shard(trained.data / "train" / "code", "a", CODE["a"], token_bytes=4)
    for listing in trained.data.rglob(LISTING):
        listing.unlink()
    changes = compare(trained.known, open_corpus(trained.data))
    assert [change.difference for change in changes.changed] == ["has ids of 4 bytes, had ids of 2"] * 4


def test_other_boundaries_in_as_many_tokens_are_a_change(trained: Trained) -> None:
    changes = trained.after(lambda web: make_shard(web, "a", [[1, 256], [2]]))
    assert lines(changes) == [
        "web/a: has other boundaries: 2 documents, 1 before, in as many tokens; all its documents were served"
    ]


def test_a_swap_of_two_shards_says_what_stands_where(trained: Trained) -> None:
    changes = trained.after(swap)
    assert [str(change).split(";")[0] for change in changes.changed] == [
        "web/a: holds what was web/b",
        "web/b: holds what was web/a",
    ]
    assert not changes.missing
    assert not changes.added


def test_a_shard_that_is_gone_is_missing(trained: Trained) -> None:
    def remove(web: Path) -> None:
        for suffix in ("bin", "idx"):
            (web / f"a.{suffix}").unlink()

    changes = trained.after(remove)
    assert lines(changes) == ["web/a: is missing; all its documents were served"]
    assert not changes.is_growth


def test_a_new_shard_is_growth_and_the_refusal_says_how_it_joins(trained: Trained) -> None:
    changes = trained.after(lambda web: make_shard(web, "aa", [[8, 256]]))
    assert changes.is_growth
    assert lines(changes) == ["web/aa: is new, 1 document in 2 tokens"]
    assert "--accept data.grow" in (changes.as_error(trained.data).so() or "")


def test_a_new_bucket_is_growth(trained: Trained) -> None:
    changes = trained.after(lambda web: make_bucket(web.parent / "math", {"a": [[8, 256]]}))
    assert [(change.bucket, change.name) for change in changes.added] == [("math", "a")]
    assert changes.is_growth


def test_a_renamed_shard_is_missing_and_new_and_the_refusal_says_where_it_stands(trained: Trained) -> None:
    changes = trained.after(lambda web: move(web, "b", "z"))
    assert lines(changes) == [
        "web/b: is missing; the same shard exists as web/z; some of its documents were served",
        "web/z: is new, 2 documents in 6 tokens",
    ]
    assert not changes.is_growth
    assert "--accept" not in (changes.as_error(trained.data).so() or "")


def test_a_flipped_bit_with_a_new_list_is_a_change_of_content(sealed: Trained) -> None:
    changes = sealed.after(flip)
    assert lines(changes) == ["web/b: has other tokens under the same index; some of its documents were served"]


def test_a_flipped_bit_under_the_old_list_is_damage_that_only_the_full_check_sees(sealed: Trained) -> None:
    assert not sealed.after(flip, is_listed_anew=False)
    with pytest.raises(DataDamaged):
        open_corpus(sealed.data, check="full")


def test_a_flipped_bit_without_a_list_is_seen_if_both_times_were_full_checks(tmp_path: Path) -> None:
    trained = Trained(tmp_path, is_sealed=False)
    trained.known = recorded(open_corpus(tmp_path, check="full").shards)
    assert not trained.after(flip)
    assert [str(change.name) for change in trained.after(lambda web: None, check="full").changed] == ["b"]


def test_a_truncated_bin_never_becomes_a_corpus_to_compare(trained: Trained) -> None:
    def cut(web: Path) -> None:
        (web / "b.bin").write_bytes((web / "b.bin").read_bytes()[:-2])

    with pytest.raises(DataDamaged):
        trained.after(cut, is_listed_anew=False)


def test_a_folder_that_is_sealed_later_is_the_same_data(tmp_path: Path) -> None:
    trained = Trained(tmp_path, is_sealed=False)
    assert not trained.after(lambda web: seal_shards(web, BYTES), is_listed_anew=False)


def test_the_refusal_counts_and_names_everything_at_once(trained: Trained) -> None:
    def everything(web: Path) -> None:
        make_shard(web, "a", [[1, 256]])
        move(web, "b", "z")

    error = trained.after(everything).as_error(trained.data)
    assert len(list(error.details())) == 3
    assert len(list(error.details())) == 3
    assert error.exit_code == 4


def test_without_knowledge_of_what_was_served_nothing_is_reported_about_it(trained: Trained) -> None:
    make_shard(trained.web, "a", [[1, 256]])
    trained._unseal()
    (change,) = compare(trained.known, open_corpus(trained.data)).changed
    assert change.served is None
    assert "served" not in str(change)


@pytest.mark.parametrize(
    "value",
    [None, [], {"web": 1}, {"web": [1]}, {"web": [["a", 1, 2]]}, {"web": [["a", 1, 2, 2, "x", 7]]}, {3: []}],
    ids=str,
)
def test_a_record_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(Malformed):
        from_json(value)
