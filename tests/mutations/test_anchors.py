"""The mutations fit the sources and name existing tests. `make test-mutations` runs them."""

import ast
import re
from collections import Counter
from functools import cache

from mutations.run import ROOT, Mutation, read_mutations

MUTATIONS = read_mutations()


def test_every_anchor_occurs_once() -> None:
    problems = [problem for mutation in MUTATIONS if (problem := mutation.anchor_problem(ROOT))]
    assert not problems, "\n".join(problems)


def test_ids_are_unique() -> None:
    repeated = [name for name, count in Counter(mutation.id for mutation in MUTATIONS).items() if count > 1]
    assert not repeated


def test_every_mutation_changes_the_source_and_describes_the_breakage() -> None:
    incomplete = [
        mutation.id
        for mutation in MUTATIONS
        if mutation.old == mutation.new
        or not re.fullmatch(r"[A-Z].*\.", mutation.breaks)
        or not mutation.tests
    ]
    assert not incomplete


def test_many_mutations_are_blind() -> None:
    assert sum(mutation.blind for mutation in MUTATIONS) >= 40
    assert len(MUTATIONS) >= 60


def test_named_tests_exist() -> None:
    absent = [
        f"{mutation.id}: {test}" for mutation in MUTATIONS for test in mutation.tests if not _exists(test)
    ]
    assert not absent, "\n".join(absent)


def test_missing_and_a_repeated_anchor_are_reported() -> None:
    for old, count in (("this is nowhere", 0), ("import", 2)):
        mutation = Mutation("some-id", "area", "It breaks.", "tests/mutations/run.py", old, "", ())
        problem = mutation.anchor_problem(ROOT)
        assert problem is not None
        assert "some-id" in problem
        assert count or "occurs 0 times" in problem


def _exists(test: str) -> bool:
    path, *names = test.partition("[")[0].split("::")
    if not (ROOT / path).is_file():
        return False
    return not names or names[-1] in _functions(path)


@cache
def _functions(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
