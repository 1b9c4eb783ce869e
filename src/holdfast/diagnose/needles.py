"""Owns what a line must contain for a pattern to match in it: strings, one of which is always there.

Looking for many plain strings at once is much faster than for many patterns. Python's own parser of patterns gives the
tree; the strings are read off it. Refuses to own patterns that need no string: those are not fit to be rules.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Without types, and private; a version of Python that moves them fails the first test that imports this.
kind: Any = import_module("re._constants")
parser: Any = import_module("re._parser")

Needles = frozenset[str]
EMPTY: Needles = frozenset({""})
LEAST_CHARS = 3
ENOUGH_CHARS = 9
"""So long strings are rare enough; beyond it few strings are better than long ones."""
MOST_STRINGS = 128
"""Most strings that one part of a pattern is written out to."""
_REPEATS: tuple[Any, ...] = (kind.MAX_REPEAT, kind.MIN_REPEAT)


def needles(pattern: str) -> Needles:
    """Strings of which each line that matches holds one; raises ValueError where the pattern promises none."""
    found = _of(parser.parse(pattern))
    if not found:
        raise ValueError(f"no string is in every line that matches {pattern}")
    return found


def folds(pattern: str) -> bool:
    """Whether any part of a pattern takes capitals for small letters."""
    return "(?i" in pattern


def _of(tree: Any) -> Needles | None:
    """The best promise that one run of a sequence makes: strings that are long enough, and few."""
    promises: list[Needles] = []
    run: Needles = EMPTY
    for operation, argument in tree:
        exact = _exact(operation, argument)
        if exact is not None and len(run) * len(exact) <= MOST_STRINGS:
            run = _joined(run, exact)
            continue
        promises.append(run)
        run = EMPTY if exact is None else exact
        if exact is None and (inner := _inside(operation, argument)) is not None:
            promises.append(inner)
    promises.append(run)
    best = max(promises, key=_worth)
    return best if _worth(best)[0] >= LEAST_CHARS else None


def _inside(operation: Any, argument: Any) -> Needles | None:
    """What a part promises that can be endlessly many strings."""
    if operation is kind.SUBPATTERN:
        return _of(argument[-1])
    if operation in _REPEATS:
        return _of(argument[2]) if argument[0] >= 1 else None
    if operation is kind.BRANCH:
        branches = [_of(branch) for branch in argument[1]]
        return frozenset[str]().union(*(each for each in branches if each)) if all(branches) else None
    return None


def _exact(operation: Any, argument: Any) -> Needles | None:
    """All strings that a part can be, where they are few."""
    if operation is kind.LITERAL:
        return frozenset({chr(argument)})
    if operation is kind.AT:
        return EMPTY
    if operation is kind.IN and all(each is kind.LITERAL for each, _ in argument):
        return frozenset(chr(code) for _, code in argument)
    if operation in _REPEATS and argument[1] == 1:
        once = _exact_run(argument[2])
        return None if once is None else once | EMPTY if argument[0] == 0 else once
    if operation is kind.SUBPATTERN:
        return _exact_run(argument[-1])
    if operation is kind.BRANCH:
        branches = [_exact_run(branch) for branch in argument[1]]
        found = frozenset[str]().union(*(each for each in branches if each is not None))
        return None if None in branches or len(found) > MOST_STRINGS else found
    return None


def _exact_run(tree: Any) -> Needles | None:
    run: Needles = EMPTY
    for operation, argument in tree:
        exact = _exact(operation, argument)
        if exact is None or len(run) * len(exact) > MOST_STRINGS:
            return None
        run = _joined(run, exact)
    return run


def _joined(before: Needles, after: Needles) -> Needles:
    return frozenset(first + second for first in before for second in after)


def _worth(promise: Needles) -> tuple[int, int, int]:
    shortest = min(map(len, promise))
    return min(shortest, ENOUGH_CHARS), -len(promise), shortest
