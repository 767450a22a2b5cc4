"""Captions to tokens: the rule, Stanford's tokenizer beside it, and whatever people type."""

from __future__ import annotations

import json
import random
import shutil
import string
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regionprep.pipeline.text import SPLIT_WORDS, tokenize


@pytest.mark.parametrize(
    ("caption", "tokens"),
    [
        ("A man rides a wave.", "a man rides a wave"),
        ("The dog's bowl; the dogs' bowls", "the dog 's bowl the dogs bowls"),
        ("They don't, can't and won't.", "they do n't ca n't and wo n't"),
        ("I'd've said she'll cannot", "i 'd 've said she 'll can not"),
        ("Rock 'n' roll at five o'clock", "rock 'n' roll at five o'clock"),
        ("A white T-shirt and/or a well-dressed man", "a white t-shirt and/or a well-dressed man"),
        ("fast--very fast - a -b- c", "fast very fast a b c"),
        ("Mr. Bob on Main St. at 8:25 a.m.", "mr. bob on main st. at 8:25 a.m."),
        ("It says 10:30am, 1,000 and 1.5 or 1/2", "it says 10:30 am 1,000 and 1.5 or 1/2"),
        ("Route no. 5, but no. Never", "route no. 5 but no never"),
        ("A plan b. The end", "a plan b the end"),
        ("J. Smith of the U.S. Army at AT&T", "j. smith of the u.s. army at at&t"),
        ('A "stop" sign (red) [new]', "a stop sign -lrb- red -rrb- -lsb- new -rsb-"),
        ("$5 for 50% & more!! Really?", "$ 5 for 50 % & more !! really"),
        ("The '90s and 1950's", "the '90s and 1950 's"),
        ("“It’s” a – dog…", "it 's a dog"),
        ("salt &amp; pepper", "salt & pepper"),
    ],
)
def test_captions_come_apart_by_the_rule(caption: str, tokens: str) -> None:
    assert tokenize(caption) == tokens.split(" ")


@pytest.mark.parametrize(
    "nothing", ["", " \t\r\n", ". , ; : ! ? ... -- - ' '' ` \"", "\x00\x07", "😀🐱"]
)
def test_captions_without_words_have_no_tokens(nothing: str) -> None:
    assert tokenize(nothing) == []


@pytest.mark.parametrize(
    "gap", ["\n", "\r\n", "\r", "\x0b", "\x00", "\x85", "\u2028", "\u200b", "\ue000"]
)
def test_newlines_and_characters_that_are_no_text_separate_words(gap: str) -> None:
    assert tokenize(f"two{gap}dogs{gap}") == ["two", "dogs"]


def test_other_scripts_stay_whole() -> None:
    assert tokenize("Кошка и CAFÉ 漢字テスト नमस्ते العربية") == [
        "кошка",
        "и",
        "café",
        "漢字テスト",
        "नमस्ते",
        "العربية",
    ]


def test_emoji_separate_words_and_symbols_stand_alone() -> None:
    assert tokenize("cat😀dog ❤️love ×2") == ["cat", "dog", "❤", "love", "×", "2"]


def test_a_soft_hyphen_vanishes() -> None:
    assert tokenize("skate\u00adboard") == ["skateboard"]


@given(st.text())
def test_tokens_are_lower_case_and_without_white_space(caption: str) -> None:
    for token in tokenize(caption):
        assert token
        assert token == token.lower()
        assert token.split() == [token]


@given(st.lists(st.text(string.ascii_lowercase, min_size=5), max_size=12))
def test_plain_words_stay_as_they_are(words: list[str]) -> None:
    words = [word for word in words if word not in SPLIT_WORDS]
    assert tokenize(" ".join(words)) == words


@pytest.mark.parametrize(
    "unit",
    ["a.", "a,", "a-", "a'", "a@", "<a", "http://", "n't", "'", "(", "a. ", "x-d'", "&amp;", " "],
)
def test_time_grows_linearly_without_white_space(unit: str) -> None:
    # A pattern that ran away would take minutes here; the bound leaves room for a slow machine.
    start = time.perf_counter()
    tokenize(unit * (40_000 // len(unit)))
    assert time.perf_counter() - start < 10


class TestAgainstStanford:
    """The same tokens as Stanford's tokenizer, asked through pycocoevalcap."""

    @pytest.fixture(autouse=True)
    def _java(self) -> None:
        if shutil.which("java") is None:
            pytest.skip("Stanford's tokenizer needs Java, and there is no `java` on the path")
        pytest.importorskip("pycocoevalcap", reason="pycocoevalcap carries Stanford's tokenizer")

    def test_every_caption_of_the_photographs(self, shared_data: Path) -> None:
        file = shared_data / "coco_sample" / "captions.json"
        if not file.is_file():
            pytest.skip(f"no captions at {file}")
        captions = [row["caption"] for row in json.loads(file.read_text())["annotations"]]
        assert len(captions) >= 1000
        assert [tokenize(caption) for caption in captions] == stanford(captions)

    @pytest.mark.parametrize(
        ("characters", "agreement"),
        [
            (" ..,,''\"\"--()!?/&:;0123456789stdnm", 0.997),
            (string.printable[:95], 0.997),
            ("“”–—…éñü½£€°×•™漢字русский😀❤\t\u200b\u00a0", 0.997),
        ],
        ids=["punctuation", "ascii", "unicode"],
    )
    def test_captions_with_random_slips(self, characters: str, agreement: float) -> None:
        captions = slips(random.Random(0), characters, count=3000)
        pairs = list(zip(map(tokenize, captions), stanford(captions), strict=True))
        assert sum(ours == theirs for ours, theirs in pairs) / len(pairs) >= agreement


CAPTIONS = """
A young man is riding a wave on his surf board.
Two dogs' bowls are on the floor next to the cat's bed
A close-up of a person's hand holding a "smart" phone, with 3 buttons.
Several toy animals - a bull, giraffe, deer and parakeet.
The clock on St. Mary's church says 8:25 a.m. and it doesn't work!
There are 1,000 people (or more) at the U.S. Open; they can't see much.
Mr. Jones sells T-shirts and/or hats for $5.50 at Smith & Sons
An old-fashioned street light, from the 1950's, isn't on.
A 10 ft. tall giraffe that won't eat: it's full
"Rock 'n' roll" is written on the wall... What a mess?
""".strip().split("\n")


def slips(rng: random.Random, characters: str, *, count: int) -> list[str]:
    """Return captions with one to three characters put in, left out or changed."""
    captions = []
    for _ in range(count):
        caption = list(rng.choice(CAPTIONS))
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(caption))
            caption[at : at + rng.randint(0, 1)] = rng.choice([[rng.choice(characters)], []])
        captions.append("".join(caption))
    return captions


def stanford(captions: Sequence[str]) -> list[list[str]]:
    """Return the tokens that pycocoevalcap gets for each caption by itself.

    Stanford's tokenizer takes a caption's last dot by the words that begin the next caption, so
    each is followed by a line of its own.
    """
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    lines = {at: [{"caption": caption}, {"caption": "A"}] for at, caption in enumerate(captions)}
    tokens = PTBTokenizer().tokenize(lines)
    assert all(pair[1] == "a" for pair in tokens.values())
    # Some of its tokens hold a no-break space, at which the scorers split them again.
    return [pair[0].split() for pair in tokens.values()]
