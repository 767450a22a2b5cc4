"""Captions to tokens, by one rule: lower case, Penn Treebank style, punctuation dropped.

The rule gives what the field's scorers get from Stanford's PTBTokenizer, whose tokens COCO's
captions are scored on, without its Java. A caption is cut at white space, each piece is read from
left to right, and at every place the longest of `PATTERNS` is the next token:

- contractions come apart: `don't` -> `do n't`, `dog's` -> `dog 's`, `cannot` -> `can not`;
- hyphens, slashes, ampersands between capitals and dots between letters hold words together:
  `t-shirt`, `and/or`, `AT&T`, `a.m.`; known abbreviations keep their dot: `st.`, `mr.`;
- numbers keep their points, commas and colons: `1,000`, `8:25`, `1.5`; `10:30am` -> `10:30 am`;
- brackets become `-lrb-`, `-rrb-`, `-lsb-` and so on; other symbols are tokens of their own;
- quotes, single `. , : ; ? !` and dashes are dropped; runs such as `!!` are kept.

Characters that are no text (control characters, private ones, and all beyond U+FFFF, so most
emoji) separate words and are dropped; a soft hyphen vanishes. An empty caption, or one of
punctuation only, has no tokens. No token holds white space, so tokens survive joining by a space
and splitting again. Where Stanford's tokenizer joins over white space (`3 1/2`, telephone numbers,
tags with attributes), the parts stay apart here, as they do once the scorers split its output.
"""

from __future__ import annotations

import functools
import re
import unicodedata

DROPPED = frozenset(
    [*".,:;?!'`-\"", "''", "``", "--", "---", "----", "\N{HYPHEN}", "\N{NON-BREAKING HYPHEN}"]
)
"""Tokens that scores leave out, and runs of dots: pycocoevalcap's list, however it is written."""

BRACKETS = str.maketrans(
    {"(": "-lrb-", ")": "-rrb-", "[": "-lsb-", "]": "-rsb-", "{": "-lcb-", "}": "-rcb-"}
)

SPLIT_WORDS = {
    "cannot": ("can", "not"),
    "gimme": ("gim", "me"),
    "gonna": ("gon", "na"),
    "gotta": ("got", "ta"),
    "lemme": ("lem", "me"),
    "wanna": ("wan", "na"),
}

# Word lists are alternatives of a pattern.
# Abbreviations that keep their dot in any case of letters, wherever they stand.
ABBREVIATIONS = (
    "adj|adm|adv|al|ala|alex|apr|ariz|assn|asst|atty|aug|ave|bhd|bldg|blvd|brig|bros|capt|cf|"
    "cie|cmdr|co|col|colo|conn|corp|cos|cpl|ct|dak|dec|dept|det|dr|drs|elec|ens|esq|est|etc|"
    "ext|feb|fla|fri|ft|ga|gen|gov|govs|hon|inc|ind|insp|intl|invt|jan|jos|jr|jul|jun|kan|kans|"
    "ky|lt|ltd|maj|mar|md|mfg|mich|minn|mlle|mme|mo|mon|mont|mr|mrs|ms|msgr|mt|mtg|natl|neb|"
    "nev|nov|oct|okla|penn|pfc|ph|plc|ppte|ppty|pres|prof|pte|ptes|pty|ptys|pvt|rd|rep|reps|"
    "rev|rt|sen|sens|sep|sept|seq|sfc|sgt|spc|sq|sr|st|ste|supt|sys|tel|tenn|thu|tue|tues|univ|"
    "va|vs|vt|wed|wis|wisc|wm|wyo"
)
# States that are words too: abbreviations only with a capital.
CAPITAL_ABBREVIATIONS = "ark|az|del|ill|la|mass|miss|ore|pa|tex|wash"
# These keep their dot before a number only: "no. 5".
NUMBERED_ABBREVIATIONS = "art|ca|fig|no|nos|op|pp"
# Before these words the dot of a single letter ends a sentence; elsewhere it marks an initial.
SENTENCE_STARTS = (
    "A|About|After|An|As|At|But|He|Her|Here|However|If|In|It|Last|Many|More|Now|Once|One|Other|"
    "Our|She|Since|So|Some|Such|That|The|Their|Then|There|These|They|This|We|What|When|While|"
    "Yet|You"
)

# White space never reaches the patterns, and of characters beyond ASCII only those of words do.
LETTER = r"[A-Za-z\x80-\uffff]"
ALNUM = r"[A-Za-z0-9\x80-\uffff]"
NET = r"[^\s\"<>|(){}.]"
_CAPITAL = f"{CAPITAL_ABBREVIATIONS.title()}|{CAPITAL_ABBREVIATIONS.upper()}"

PATTERNS = tuple(
    re.compile(pattern)
    for pattern in (
        rf"{ALNUM}+",
        # Words held together. The bounds keep the time linear in text without white space.
        rf"(?:[dolDOL]'{ALNUM})?{ALNUM}[\w.,]{{0,99}}(?:-(?:[dolDOL]'{ALNUM})?{ALNUM}{{1,99}})+",
        rf"{ALNUM}+(?:_{ALNUM}+)+",
        r"[A-Za-z0-9]+(?:[-/][A-Za-z0-9]+)+",
        rf"{LETTER}{ALNUM}*(?:[.!?]{LETTER}{ALNUM}*)+",
        r"[A-Z]+(?:&[A-Z]+)+",
        # Initials and abbreviations.
        r"[A-Za-z](?:\.[A-Za-z])*\.",
        rf"(?:(?i:{ABBREVIATIONS})|{_CAPITAL})\.",
        r"(?i:ph\.d)\.",
        rf"((?i:{NUMBERED_ABBREVIATIONS})\.)\d",
        rf"({LETTER}{ALNUM}*\.)[,:;]",
        # Numbers, clock times, amounts.
        r"[-+]?\d+",
        r"[-+]?\d*(?:[.,:]\d+)+",
        r"[A-Z]{1,9}\$",
        # Apostrophes: contractions, elisions, decades, names.
        r"([A-Za-z]*(?![nN])[A-Za-z])[nN]'[tT]",
        r"(?i:'(?:s|m|d|re|ve|ll)|n't)(?![A-Za-z])",
        r"(?i:'n'|'n$|'em|'till?|'cause|'t(?=is|was))",
        rf"'(?:\d0s|\d\d(?![\"']|{ALNUM}))",
        rf"(?i:[djl]'|ol'|y'(?={LETTER}{{2}})|c'mon|s'mores|(?:somethin|dunkin)'|nor'easter)",
        rf"(?:[dlnoO]|[A-HJ-XZ])'{LETTER}{{2,}}",
        rf"{LETTER}+[aeiouyAEIOUY]'[aeiouA-Z]{LETTER}*",
        # Things of the net.
        r"https?://[^\s\"<>.]{1,99}\.[^\s\"<>]*[^\s\"<>.,;:!?')]",
        rf"[A-Za-z0-9][^\s\"<>|(){{}}@]{{0,99}}@{NET}+(?:\.{NET}+)*",
        r"@[A-Za-z_]\w*",
        r"\#[A-Za-z]+",
        r"</?[A-Za-z][^<>\s]{0,99}>",
        rf"[:;=][-o*']?[()DOPdp@|](?!{ALNUM})",
        # Runs of one mark, then any character by itself.
        r"\.\.\.+|[!?]+|-+|_+|\*+|\#+|''|``",
        r"[cC]\+\+|[cCfF]\#",
        r".",
    )
)

ENTITIES = {"amp": "&", "lt": "<", "gt": ">", "quot": '"', "apos": "'", "nbsp": " "}
_ENTITY = re.compile(r"&(amp|lt|gt|quot|apos|nbsp);", re.IGNORECASE)
_NUMBERED = re.compile(rf"\b({NUMBERED_ABBREVIATIONS})\.\s+(?=\d)", re.IGNORECASE)
_SENTENCE_END = re.compile(rf"(?<!\w)(?<!\w\.)([A-Za-z])\.(?=\s*$|\s+(?:{SENTENCE_STARTS})\s)")

_REPLACEMENTS = {
    **dict.fromkeys(["\u00ad", *map(chr, range(0xFE00, 0xFE10))], ""),
    **dict.fromkeys("‘‛‹\x91", "`"),
    **dict.fromkeys("’›\x92", "'"),
    **dict.fromkeys("“”«»\x93\x94", '"'),
    **dict.fromkeys("–—―\x96\x97", " -- "),
    **dict.fromkeys("…\x85", " ... "),
    **dict.fromkeys("€¤₠\x80", " $ "),
    "£": " # ",
    "¢": " cents ",
    "½": " 1/2 ",
    "¼": " 1/4 ",
    "¾": " 3/4 ",
    "⅓": " 1/3 ",
    "⅔": " 2/3 ",
}


def tokenize(caption: str) -> list[str]:
    """Return the tokens of a caption, by the rule at the head of this module.

    Takes any string; time grows linearly with its length.
    """
    if not (caption.isascii() and caption.isprintable()):
        caption = caption.translate(_PLAIN)
    if "&" in caption:
        caption = _ENTITY.sub(lambda found: ENTITIES[found[1].lower()], caption)
    if "." in caption:
        caption = _SENTENCE_END.sub(r"\1 .", _NUMBERED.sub(r"\1.", caption))
    return [token for piece in caption.split() for token in _tokens(piece)]


@functools.lru_cache(maxsize=1 << 16)
def _tokens(piece: str) -> tuple[str, ...]:
    """Return the tokens of a piece without white space; captions repeat few pieces."""
    tokens: list[str] = []
    at = 0
    while at < len(piece):
        matches = (match for pattern in PATTERNS if (match := pattern.match(piece, at)))
        longest = max(matches, key=re.Match.end)
        at = longest.end(longest.lastindex or 0)
        token = piece[longest.start() : at].lower()
        if token in SPLIT_WORDS:
            tokens += SPLIT_WORDS[token]
        elif token not in DROPPED and token.strip("."):
            tokens.append(token.translate(BRACKETS))
    return tuple(tokens)


class _Plain(dict[int, str]):
    """What stands for a character outside printable ASCII, found once a character."""

    def __missing__(self, code: int) -> str:
        self[code] = plain = _plain(chr(code))
        return plain


def _plain(character: str) -> str:
    """Return letters, marks and digits as they are, symbols between spaces, others as a space."""
    if character in _REPLACEMENTS:
        return _REPLACEMENTS[character]
    category = unicodedata.category(character)
    if character > "\uffff" or category[0] in "CZ":
        return " "
    if character.isascii() or category[0] in "LM" or category == "Nd":
        return character
    return f" {character} "


_PLAIN = _Plain()
