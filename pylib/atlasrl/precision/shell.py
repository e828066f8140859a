"""A launch script in shell form, read and never run: its hydra overrides and its environment.

Enough of the shell is understood for the launch scripts that verl's users write: assignments, `export`, arrays,
`${NAME:-default}`, `$((arithmetic))`, continued lines, quotes. What only running could tell (`$(command)`, arguments of
the caller, variables nobody sets) stays in the text as it is written, and is noted.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from atlasrl.errors import UsageFault

LARGEST = 1 << 20  # characters; the longest launch script in verl's repository has 12 thousand
PUNCTUATION = ";&|()<>\n"
TRAINERS = re.compile(r"main_ppo|main_dapo|atlasrl\.trainer")
ASSIGNMENT = re.compile(r"(\w+)=(.*)", re.DOTALL)
OVERRIDE = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w.@/-]*)=(.*)", re.DOTALL)
PARAMETER = re.compile(r"(\w+)(?:(:?[-=])(.*))?", re.DOTALL)
MARK = re.compile("\x00(\\d+)\x00")
BRANCHES = {"if", "case", "for", "while", "until"}
BEFORE_COMMANDS = {"(", "{", "then", "do", "else", "elif", "env", "exec", "nohup", "time"}
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(a / b),  # the shell's division truncates
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
}


@dataclass
class Launch:
    """What a script would start: hydra key -> text, variable -> text, the `--config-name`, and what stays unknown."""

    overrides: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    config_name: str | None = None
    notes: list[str] = field(default_factory=list)


def read(file: Path) -> Launch:
    """Parse a launch script. Raises UsageFault: unreadable, too large, unbalanced quotes, or it starts no verl."""
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as problem:
        raise UsageFault(f"{file} cannot be read: {problem}") from None
    if len(text) > LARGEST:
        raise UsageFault(f"{file} has {len(text)} characters; a launch script has at most {LARGEST}")
    try:
        launch = parse(text)
    except ValueError as problem:
        raise UsageFault(f"{file} is no shell script that can be read: {str(problem).lower()}") from None
    if not launch.overrides:
        raise UsageFault(
            f"{file} starts no verl: no command names main_ppo or main_dapo and has key=value arguments; give the "
            "script that holds the python command, or the resolved config (.hydra/config.yaml)"
        )
    return launch


def parse(text: str) -> Launch:
    """Read the text of a script. Raises ValueError: unbalanced quotes or brackets."""
    script = _Script(*_lift(text.replace("\\\n", " ")))
    for command in _commands(script.text):
        script.take(command)
    script.launch.notes = list(dict.fromkeys(script.launch.notes))
    return script.launch


class _Script:
    """The variables of a script while it is read from top to bottom."""

    def __init__(self, text: str, lifted: list[str]):
        self.text, self.lifted, self.launch = text, lifted, Launch()
        self.variables: dict[str, str] = {}
        self.arrays: dict[str, list[str]] = {}

    def take(self, words: list[str]) -> None:
        """One command: assignments, an export, an array, or the start of the trainer."""
        if words[0] in BRANCHES:
            self.launch.notes.append(f"`{words[0]}` is not decided: every branch is read, the last assignment counts")
        if words[0] in ("source", "."):
            self.launch.notes.append(f"`{' '.join(map(self.expand, words))}` is not followed")
        while words and words[0] in BEFORE_COMMANDS:
            words = words[1:]
        exports = bool(words) and words[0] in ("export", "declare", "local", "readonly")
        rest = words[1:] if exports else words
        assigned: dict[str, str] = {}
        while rest and (match := ASSIGNMENT.fullmatch(rest[0])):
            if rest[1:2] == ["("]:
                end = rest.index(")")
                self.arrays[match[1]] = [part for word in rest[2:end] for part in self.split(word)]
                rest = rest[end + 1 :]
                continue
            assigned[match[1]] = self.variables[match[1]] = self.expand(match[2])
            rest = rest[1:]
        names = {word: self.variables[word] for word in rest if exports and word in self.variables}
        if exports or rest:  # `export A=1`, or `A=1 python …`
            self.launch.environment |= assigned | names
        module = next((i for i, word in enumerate(rest) if TRAINERS.search(word)), None)
        if module is not None:
            self._start([part for word in rest[module + 1 :] for part in self.split(word)])

    def _start(self, arguments: list[str]) -> None:
        for before, argument in zip(["", *arguments], arguments, strict=False):
            if before in ("--config-name", "-cn"):
                argument = f"{before}={argument}"
            if argument.startswith(("--config-name=", "-cn=")):
                self.launch.config_name = argument.partition("=")[2].removesuffix(".yaml")
            elif match := OVERRIDE.fullmatch(argument):
                self.launch.overrides[match[2]] = match[3]
            elif argument.startswith("$"):
                self.launch.notes.append(f"`{argument}` adds arguments that only the caller knows")

    def split(self, word: str) -> list[str]:
        """A word as one argument, or as the elements of the array that it names."""
        match = MARK.fullmatch(word)
        body = self.lifted[int(match[1])] if match else ""
        named = re.fullmatch(r"\$\{(\w+)\[[@*]\]\}", body)
        return self.arrays[named[1]] if named and named[1] in self.arrays else [self.expand(word)]

    def expand(self, word: str) -> str:
        """The word with every known expansion in place; the others stay as they are written."""
        return MARK.sub(lambda found: self._value(self.lifted[int(found[1])]), word)

    def _value(self, body: str) -> str:
        if body.startswith("$(("):
            return self._arithmetic(body)
        parameter = PARAMETER.fullmatch(body.strip("${}") if not body.startswith("${") else body[2:-1])
        if parameter is None or body.startswith(("$(", "`")):
            self.launch.notes.append(f"`{body}` is known only when the script runs")
            return body
        name, kind, default = parameter.groups()
        if name in self.variables:
            return self.variables[name]
        if kind:
            return self.expand("".join(shlex.split(_relift(default, self.lifted))))
        self.launch.notes.append(f"`{body}` is set nowhere in the script")
        return body

    def _arithmetic(self, body: str) -> str:
        inner = self.expand(_relift(body[3:-2], self.lifted))
        try:
            return str(self._evaluate(ast.parse(inner.strip(), mode="eval").body))
        except (SyntaxError, ValueError, KeyError, ZeroDivisionError, RecursionError):
            self.launch.notes.append(f"`{body}` is known only when the script runs")
            return body

    def _evaluate(self, node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name):
            return int(self.variables[node.id])
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](self._evaluate(node.left), self._evaluate(node.right))
        if isinstance(node, ast.UnaryOp):
            return OPERATORS[type(node.op)](self._evaluate(node.operand))
        raise ValueError(ast.dump(node))


def _commands(text: str) -> list[list[str]]:
    """The words of each simple command. Brackets stay as words, since arrays need them."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=PUNCTUATION)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    commands: list[list[str]] = [[]]
    depth = 0
    for word in lexer:
        if not set(word) <= set(PUNCTUATION):
            commands[-1].append(word)
            continue
        for sign in word:
            depth += {"(": 1, ")": -1}.get(sign, 0)
            if sign in "()":
                commands[-1].append(sign)
            elif depth <= 0:
                commands.append([])
    return [command for command in commands if command]


def _relift(text: str, lifted: list[str]) -> str:
    """Lift the expansions of a text that was itself lifted."""
    marked, inner = _lift(text)
    start = len(lifted)
    lifted += inner
    return MARK.sub(lambda found: f"\x00{start + int(found[1])}\x00", marked)


def _lift(text: str) -> tuple[str, list[str]]:
    """Replace each `$…` outside single quotes by a mark, so that quotes and spaces in it mean nothing to shlex.

    Comments go too: an apostrophe in one would open a quotation.
    """
    out: list[str] = []
    lifted: list[str] = []
    position, quote = 0, ""
    text = text.replace("\x00", "")
    while position < len(text):
        sign = text[position]
        if sign == "\\" and quote != "'":
            out.append(text[position : position + 2])
            position += 2
        elif sign in "'\"" and quote in ("", sign):
            quote = "" if quote else sign
            out.append(sign)
            position += 1
        elif sign == "#" and not quote and (not out or out[-1][-1:] in (" ", "\t", "\n", ";")):
            position = text.find("\n", position) if "\n" in text[position:] else len(text)
        elif sign in "$`" and quote != "'" and (end := _end(text, position)) > position + 1:
            out.append(f"\x00{len(lifted)}\x00")
            lifted.append(text[position:end])
            position = end
        else:
            out.append(sign)
            position += 1
    return "".join(out), lifted


def _end(text: str, start: int) -> int:
    """Where the expansion that begins at `start` ends. Raises ValueError: its bracket is never closed."""
    if text[start] == "`":
        end = text.find("`", start + 1) + 1
        if not end:
            raise ValueError("a ` is never closed")
        return end
    opening = text[start + 1 : start + 2]
    if opening not in ("(", "{"):
        match = re.compile(r"\w+|[@*#?]").match(text, start + 1)
        return match.end() if match else start + 1
    depth = 0
    for position in range(start + 1, len(text)):
        depth += (text[position] == opening) - (text[position] == ")}"["({".index(opening)])
        if depth == 0:
            return position + 1
    raise ValueError(f"${opening} is never closed")
