"""Minimal parser of the project's Dockerfile."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Stage:
    """Instructions of one stage."""

    base: str
    args: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    run: list[str] = field(default_factory=list)
    user: str = "0:0"
    expose: str = ""
    health_command: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)


def stages(path: Path) -> list[Stage]:
    """Return the stages in order."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text("utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    found: list[Stage] = []
    for line in text.splitlines():
        instruction, _, rest = line.strip().partition(" ")
        if instruction == "FROM":
            found.append(Stage(rest))
        elif found:
            _note(found[-1], instruction, rest.strip())
    return found


def _note(stage: Stage, instruction: str, rest: str) -> None:
    match instruction:
        case "ARG" | "ENV":
            known = stage.args if instruction == "ARG" else stage.env
            known.update((name, text) for name, _, text in (pair.partition("=") for pair in rest.split()))
        case "RUN":
            stage.run.append(rest)
        case "USER":
            stage.user = rest
        case "EXPOSE":
            stage.expose = rest
        case "HEALTHCHECK":
            stage.health_command = json.loads(rest.partition(" CMD ")[2])
        case "ENTRYPOINT":
            stage.entrypoint = json.loads(rest)
        case "CMD":
            stage.command = json.loads(rest)
