"""Check that docstrings, comments, messages and docs are in plain technical English.

    check_prose.py              check; exit 1 on a violation
    check_prose.py --shrink     remove from the pending list what has no violation any more
    check_prose.py --list       print the path of each file with a violation

Two rules. No text uses a phrase of BANNED: each hides who does what, and has a plain word instead. Every docstring of
the package begins with a verb in the imperative ("Return", not "Returns" and not "The"). A word that is neither in
NO_VERB nor has an ending of a noun, a participle or the third person is taken for a verb: the check finds the usual
slips, not all of them.

Files that are still to be rewritten are listed in prose_pending.txt. The list can only shrink: a file in it that has no
violation any more, or does not exist, is a violation itself.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PENDING = Path(__file__).with_name("prose_pending.txt")
PACKAGE = "cmdop_migrate"
CODE = (PACKAGE, "scripts", "tests", "docs/examples")
EXEMPT = ("scripts/py/check_prose.py", "tests/unit/test_prose_check.py")  # they name what is banned

# phrase -> what to write instead
BANNED = {
    r"who(?:so)?ever|whomever": "name the subject",
    r"whatever": "name the subject, or: regardless of",
    r"nobody|no one": "no process, no client, no host, …",
    r"somebody|anybody": "name the subject",
    r"st(?:ands?|ood|anding) still": "frozen",
    r"go(?:es|ing)? on|went on": "resume, continue, keep running",
    r"is said|is told": "is reported, is notified",
    r"(?:is|are) (?-i:none)": "is not a …, does not exist",  # not Python's None
    r"who comes": "name the subject",
    r"put away": "suspended to the store",
    r"brought back": "restored",
    r"as ever": "as before",
    r"by and by": "gradually",
    r"beforehand": "earlier, first",
    r"for ever": "forever, permanently",
}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


NO_VERB = _words(
    """
    a about above absolute after again all also although an and another any anything are as at because before behind
    below beside between both but by cannot channel children commands each either else every everything false few for
    four from frozen had half has he held her here his how i if in input inside into is it its just large last
    least less like many may me memory more most much must my neither never new no none nor not nothing now of off old
    oldest on once one only or other others our out outside over owner past plain processor progress protobuf pure
    random rather raw room same session she should since six small so some someone something standard such than that the
    their them then there these they this those though thread-safe three to told true two under unless until up upon was
    we were what when where wherever whether which while who whole whom whose why will with within without would written
    yes you your
    """
)
VERBS_IN_ING = frozenset({"bring", "ping", "ring", "swing"})
VERBS_IN_ED = frozenset({"embed", "exceed", "feed", "need", "proceed", "seed", "shed", "speed"})
NOUN_ENDINGS = ("tion", "ment", "ness", "ity", "ance", "ence", "ism", "able", "ible", "ly", "ful", "ive", "al")
VERBS_IN_NOUN_ENDINGS = _words(
    """
    advance apply archive arrive augment balance comment comply condition deal derive disable document drive enable
    enhance equal fence function give heal implement increment instance journal live mention multiply outlive
    partition position question receive reference rely reply reveal seal sequence signal silence steal supplement
    supply survive tally transition
    """
)
_BREAK = r"[\s#]+"  # also where a comment is broken across lines
_BANNED = [
    (re.compile(r"\b(?:" + phrase.replace(" ", _BREAK) + r")\b", re.IGNORECASE), hint)
    for phrase, hint in BANNED.items()
]
_FIRST = re.compile(r"[A-Z][a-z]+(?:-[a-z]+)?(?![\w-])")


class Violation(NamedTuple):
    path: str
    line: int
    problem: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.problem}"


def is_imperative(docstring: str) -> bool:
    """Return False if the first word of `docstring` cannot be a verb in the imperative."""
    match = _FIRST.match(docstring.lstrip())
    if match is None:
        return False
    word = match[0].lower()
    if word in NO_VERB:
        return False
    if word.endswith("s"):
        return word.endswith("ss") or word == "focus"
    if word.endswith("ing"):
        return word in VERBS_IN_ING
    if word.endswith("ed"):
        return word in VERBS_IN_ED
    return not word.endswith(NOUN_ENDINGS) or word in VERBS_IN_NOUN_ENDINGS


def banned(text: str, first_line: int = 1) -> Iterator[tuple[int, str]]:
    """Yield (line, problem) of each banned phrase, also where it is broken across lines."""
    for pattern, hint in _BANNED:
        for match in pattern.finditer(text):
            line = first_line + text.count("\n", 0, match.start())
            yield line, f"{' '.join(match[0].split())!r}: write {hint}"


def check_python(path: str, source: str) -> Iterator[Violation]:
    """Yield the violations of one Python file. The string literals of tests are data, and are not checked."""
    tree = ast.parse(source, path)
    docstrings = set()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if path.startswith("tests/") and getattr(node, "name", "").startswith("test_"):
            for _, problem in banned(node.name.replace("_", " ")):  # type: ignore[union-attr]
                yield Violation(path, node.lineno, f"name {problem}")  # type: ignore[union-attr]
        docstring = ast.get_docstring(node, clean=False)
        if docstring is None:
            continue
        constant = node.body[0].value  # type: ignore[attr-defined]
        docstrings.add(constant)
        if path.startswith(f"{PACKAGE}/") and not is_imperative(docstring):
            first = " ".join(docstring.split()[:4])
            yield Violation(path, constant.lineno, f"docstring does not begin with an imperative verb: {first!r}")
        for line, problem in banned(docstring, constant.lineno):
            yield Violation(path, line, problem)
    if not path.startswith("tests/"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
                for _, problem in banned(node.value):
                    yield Violation(path, node.lineno, problem)
    for line, comment in _comments(source):
        for at, problem in banned(comment, line):
            yield Violation(path, at, problem)


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each comment, consecutive lines together."""
    began, text, last = 0, "", -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if token.start[0] == last + 1 and text:
            text += "\n" + token.string
        else:
            if text:
                yield began, text
            began, text = token.start[0], token.string
        last = token.start[0]
    if text:
        yield began, text


def check_text(path: str, text: str) -> Iterator[Violation]:
    """Yield the violations of a page, a shell script or a file of the web page."""
    for line, problem in banned(text):
        yield Violation(path, line, problem)


def files() -> Iterator[Path]:
    """Yield the files that are checked."""
    for folder in CODE:
        yield from sorted((ROOT / folder).rglob("*.py"))
    yield from sorted((ROOT / "docs").rglob("*.md"))
    yield from (ROOT / name for name in ("README.md", "CONTRIBUTING.md") if (ROOT / name).exists())
    for file in sorted((ROOT / PACKAGE / "relay" / "web").rglob("*")):
        if file.suffix in (".js", ".html", ".css") and "vendor" not in file.parts:
            yield file
    for file in sorted((ROOT / "scripts").rglob("*")):
        if file.is_file() and not file.suffix and file.read_bytes().startswith(b"#!"):
            yield file


def check(file: Path) -> list[Violation]:
    """Return the violations of one file, in the order of its lines."""
    path = file.relative_to(ROOT).as_posix()
    if path in EXEMPT:
        return []
    text = file.read_text(encoding="utf-8")
    found = check_python(path, text) if file.suffix == ".py" else check_text(path, text)
    return sorted(found, key=lambda violation: violation.line)


def main() -> int:
    parser = argparse.ArgumentParser(description="Check that the prose of the project is plain English.")
    parser.add_argument("--shrink", action="store_true", help="remove what is done from the pending list")
    parser.add_argument("--list", action="store_true", help="print the path of each file with a violation")
    options = parser.parse_args()
    violations = {file.relative_to(ROOT).as_posix(): found for file in files() if (found := check(file))}
    if options.list:
        print("\n".join(violations))
        return 0
    pending = set(PENDING.read_text(encoding="utf-8").split()) if PENDING.exists() else set()
    done = pending - violations.keys()
    if options.shrink:
        pending -= done
        PENDING.write_text("".join(f"{path}\n" for path in sorted(pending)), encoding="utf-8")
        done = set()
    problems = [str(one) for path, found in violations.items() if path not in pending for one in found]
    problems += [f"{path}: has no violation any more; run {sys.argv[0]} --shrink" for path in sorted(done)]
    print("\n".join(problems) if problems else f"prose: {len(pending)} files still to be rewritten")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
