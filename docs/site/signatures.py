"""An extension of griffe, which reads the sources for the reference: what it would misunderstand of ours."""

import re
from collections.abc import Iterator
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^( *)>>> .*(?:\n(?! *$).*)*", re.MULTILINE)
_SHARED_ENTRY = re.compile(r"^( +)(\w+(?:, \w+)+)(: .*(?:\n\1 +.*)*)", re.MULTILINE)
_ARGUMENTS = re.compile(r"^ *(?:Args|Attributes):\n(?:.+\n?)+", re.MULTILINE)


class OurDocstrings(griffe.Extension):
    """Signatures of `@takes`, examples as code, and an entry for each parameter that shares one."""

    def on_object(self, *, obj: griffe.Object, **_others: Any) -> None:  # noqa: ANN401 - griffe's
        """Change the docstring of a class, function, attribute or module."""
        if obj.docstring is not None:
            text = _EXAMPLE.sub(r"\1```pycon\n\g<0>\n\1```", obj.docstring.value)
            obj.docstring.value = _ARGUMENTS.sub(lambda section: _SHARED_ENTRY.sub(_split, section[0]), text)

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_others: Any) -> None:  # noqa: ANN401 - griffe's
        """Give the methods with `@takes(plan)` the parameters of `plan`, as the decorator does."""
        for module in [pkg, *_modules_in(pkg)]:
            for class_ in module.classes.values():
                if not class_.is_alias:
                    for function in class_.functions.values():
                        if not function.is_alias:
                            _replace_parameters(function, loader)


def _modules_in(module: griffe.Module) -> Iterator[griffe.Module]:
    for inner in module.modules.values():
        if not inner.is_alias:
            yield inner
            yield from _modules_in(inner)


def _split(entry: re.Match[str]) -> str:
    return "\n".join(f"{entry[1]}{name}{entry[3]}" for name in entry[2].split(", "))


def _replace_parameters(function: griffe.Function, loader: griffe.GriffeLoader) -> None:
    for decorator in function.decorators:
        if isinstance(decorator.value, griffe.ExprCall) and str(decorator.value.function) == "takes":
            [made] = decorator.value.arguments
            assert isinstance(made, griffe.Expr)
            plan = loader.modules_collection[made.canonical_path]
            function.parameters = griffe.Parameters(function.parameters["self"], *plan.parameters)
