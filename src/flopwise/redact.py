"""Removes secrets from texts that are kept: commands, reasons, names of ranges, ops and kernels."""

import os
import re
from collections.abc import Sequence

REMOVED = "[removed]"

_TOKENS = r"""
    (?<![A-Za-z0-9]) (?: hf_[A-Za-z0-9]{12,} | sk-[A-Za-z0-9_-]{16,} | gh[pousr]_[A-Za-z0-9]{16,} | github_pat_\w{20,}
      | glpat-[\w-]{16,} | xox[abposr]-[\w-]{10,} | A[KS]IA[0-9A-Z]{16} | AIza[\w-]{30,} | eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)? )
    | (?i: \bbearer\s+ [\w.~+/=-]{8,} )
    | -----BEGIN\s[\w\s]{0,40}KEY-----.*
"""
_SECRET = (
    r"(?: secret | passw(?:or)?d | passphrase | pwd | credentials? | api[_-]?key | access[_-]?key | private[_-]?key )"
)
# Whole where it is quoted, spaces and escaped quotes included; else up to a space.
_VALUE = r"""(?: "(?:\\.|[^"\\])*"? | '(?:\\.|[^'\\])*'? | \\+"[^"]*"? | \\+'[^']*'? | [^\s"':] \S* )"""
_QUOTE = r"""(?: \\* ["'] )?"""
_NO_COUNT = rf"(?! {_QUOTE} \d{{1,12}} (?![\w.-]) )"  # a plain number is a count (tokens=512), not a token
_ASSIGNMENTS = rf"""
    | (?i: {_SECRET} [\w.-]{{0,60}} {_QUOTE} \s* (?: => | :?= ) \s* {_VALUE} )
    | (?i: (?: token | (?<![a-z])key ) [\w.-]{{0,60}} {_QUOTE} \s* (?: => | :?= ) \s* {_NO_COUNT} {_VALUE} )
    | (?i: (?: {_SECRET} | (?: token | [_-]key ) (?= {_QUOTE} \s* : \s* {_NO_COUNT} ) ) {_QUOTE} \s* : \s* {_VALUE} )
    | (?i: (?<![\w-]) --? [\w-]{{0,60}} (?: {_SECRET} | (?: token | (?<![a-z])key ) (?= \s+ {_NO_COUNT} ) ) \s+ (?!-) {_VALUE} )
    | (?i: (?<![a-z]) auth(?:orization)? {_QUOTE} \s* [:=] \s* {_QUOTE}
      (?: (?: basic | bearer | digest | token ) \s+ )? {_VALUE} )
    | (?i: [?&] [\w-]{{0,20}} sig(?:nature)? = \S+ )
    | (?<=://) [^/\s@]+ (?=@)
"""
_WHO = r"""
    | [\w.+-]{1,64} @ [\w-]+ (?: \. [\w-]+ )+
    | (?: /home/ | /Users/ | /root/ | (?<!\w) ~[\w-]*/ | [A-Za-z]:\\Users\\ ) [^\s"',;:()]*
"""
_LONG_CODES = r"""
    | (?<![A-Za-z0-9]) [0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12} (?![A-Za-z0-9])
    | (?<![A-Za-z0-9]) [0-9a-fA-F]{32,} (?![A-Za-z0-9])
    | (?<![A-Za-z0-9+/]) (?= [A-Za-z0-9+/]*[A-Z] ) (?= [A-Za-z0-9+/]*[a-z] )  # a long class name has its digits in one place
      (?= [A-Za-z0-9/]* (?: [0-9][A-Za-z/]+[0-9] | \+ ) | [A-Za-z0-9/]+= ) [A-Za-z0-9+/]{40,}={0,2}
"""
_IN_LINE = re.compile(_TOKENS + _ASSIGNMENTS, re.VERBOSE | re.DOTALL)
_IN_CODE = re.compile(_TOKENS + _ASSIGNMENTS + _WHO, re.VERBOSE | re.DOTALL)
_IN_TEXT = re.compile(_TOKENS + _ASSIGNMENTS + _WHO + _LONG_CODES, re.VERBOSE | re.DOTALL)
# An address: scheme and host, folders, the file's name, and what is asked of it.
_ADDRESSES = re.compile(
    r"(?<!\w)[A-Za-z][\w+.-]{0,20}://[^/\\\s\"',;()<>]*(?:[/\\](?:[^/\\\s\"',;()<>?#]*[/\\])*([^/\\\s\"',;()<>?#]*))?(?:[?#][^\s\"'<>]*)?"
)
_FOLDERS = re.compile(r"(?<![\w:/.\]])(?:[A-Za-z]:)?[/\\](?:[^/\\\s\"',;:()<>]+[/\\])+")
# The patterns cost 50 µs on a text; one without any of these cannot match them.
_SIGNS = (
    r"hf_ sk- ghp_ gho_ ghu_ ghs_ ghr_ github_pat_ glpat- xox akia asia aiza eyj bearer begin secret token passw "
    r"passphrase pwd credential key auth sig @ / \ ~"
)
_EACH_SIGN = _SIGNS.split()
_LONG_CODE = re.compile(r"[0-9a-zA-Z+/]{32}|[0-9a-fA-F]{8}-")
_OPTION = re.compile(rf"--?[\w.-]{{0,60}}?(?:{_SECRET}|(?<![a-z])(?:auth|key)|token)", re.VERBOSE | re.IGNORECASE)
_VARIABLE = re.compile(rf".*(?:{_SECRET}|token|(?<![a-z])key|auth)", re.VERBOSE | re.IGNORECASE)
_FOLDER_NAMES = ("PWD", "OLDPWD")  # no passwords
_COUNT = re.compile(r"\d{1,12}")
_LEAST = 6  # characters of a variable that is a secret: a shorter one would be in everything
_LONGEST = 20_000  # of a name; what is cut off cannot leak, and no pattern runs over megabytes


def redacted(text: str) -> str:
    """A text that a user wrote, without what looks like a secret, and with file names instead of paths.

    >>> redacted("load hf_abcdefghijklmnop"), redacted("step, tokens=512"), redacted("WANDB_API_KEY=abc123x")
    ('load [removed]', 'step, tokens=512', 'WANDB_[removed]')
    >>> redacted("read /home/eve/data.bin"), redacted("read /mnt/project/data.bin")
    ('read [removed]', 'read data.bin')
    >>> redacted('{"token": "two words"}'), redacted("file:///mnt/project/train.py")
    ('{"[removed]}', '[removed]/train.py')
    """
    text = text[:_LONGEST]
    if not (_shows_signs(text) or _LONG_CODE.search(text)):
        return text
    return _FOLDERS.sub("", _ADDRESSES.sub(rf"{REMOVED}/\1", _IN_TEXT.sub(REMOVED, text)))


def redacted_code(name: str) -> str:
    """A kernel's or an API's name: long codes in it are types and hashes that tell kernels apart, and stay.

    >>> redacted_code("triton_poi_fused_0d1d2d3de4d5c6789abcdef0123456789abcdef")
    'triton_poi_fused_0d1d2d3de4d5c6789abcdef0123456789abcdef'
    """
    name = name[:_LONGEST]
    return _IN_CODE.sub(REMOVED, name) if _shows_signs(name) else name


def _shows_signs(text: str) -> bool:
    lowered = text.lower()
    return any(sign in lowered for sign in _EACH_SIGN)


def redacted_frame(name: str) -> str:
    """A Python frame: `/home/eve/run/train.py(12): forward` keeps the file's name only.

    >>> redacted_frame("/home/eve/my project/train.py(12): forward")
    'train.py(12): forward'
    """
    path, bracket, rest = name[:_LONGEST].partition("(")
    return redacted(re.split(r"[/\\]", path)[-1] + bracket + rest)


def redacted_line(text: str) -> str:
    """What a program raised or a user typed, without secrets: values of variables that are called like one, too.

    Folders stay, from the home folder on.

    >>> redacted_line("cannot log in with hf_abcdefghijklmnop at https://eve:pass@host/x")
    'cannot log in with [removed] at https://[removed]@host/x'
    """
    for secret in _secret_variables():
        text = text.replace(secret, REMOVED)
    if _shows_signs(text):
        text = _IN_LINE.sub(REMOVED, text[:_LONGEST])
    home = os.path.expanduser("~")
    return re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text) if len(home) > 1 else text


def redacted_lines(text: str) -> str:
    """A traceback for a log: each of its lines."""
    return "".join(map(redacted_line, text.splitlines(keepends=True)))


def redacted_words(words: Sequence[str]) -> list[str]:
    """The words of a command line; the value of an option that is called like a secret goes whole.

    >>> redacted_words(["train.py", "--token", "abc", "--api-key=two words", "--tokens", "15T", "--key", "5"])
    ['train.py', '--token', '[removed]', '--api-key=[removed]', '--tokens', '15T', '--key', '5']
    """
    kept: list[str] = []
    for before, word in zip(("", *words), words, strict=False):
        name, sign, value = word.partition("=")
        if _OPTION.fullmatch(name) and sign and not _COUNT.fullmatch(value):
            kept.append(f"{name}={REMOVED}")
        elif _OPTION.fullmatch(before) and not word.startswith("-") and not _COUNT.fullmatch(word):
            kept.append(REMOVED)
        else:
            kept.append(redacted_line(word))
    return kept


def _secret_variables() -> list[str]:
    """The longest first: one may be a part of another."""
    named = {name: value for name, value in os.environ.items() if name not in _FOLDER_NAMES}
    found = {value for name, value in named.items() if len(value) >= _LEAST and _VARIABLE.fullmatch(name)}
    return sorted(found, key=len, reverse=True)
