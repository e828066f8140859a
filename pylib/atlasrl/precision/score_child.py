"""Score answers with one reward rule, in a process of its own: `python score_child.py RULE FUNCTION ANSWERS FIRST`.

Runs under any Python from 3.8 on, so that a rule is called where its packages are: only the standard library is used.
Reads ANSWERS (JSON lines) from number FIRST on; writes `ready`, then one JSON line an answer. What the rule prints goes
to standard error.
"""

import contextlib
import importlib
import importlib.util
import json
import math
import os
import sys


def main() -> None:
    rule, function, answers, first = sys.argv[1:]
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a rule that prints, also from C, must not write between the results
    score = load(rule, function)
    out.write("ready\n")
    out.flush()
    with open(answers) as lines:  # noqa: PTH123  pathlib costs a third of the start on old Pythons
        for number, line in enumerate(lines):
            if number >= int(first):
                out.write(json.dumps(judge(score, json.loads(line))) + "\n")
                out.flush()


def load(rule: str, function: str):
    """The scoring function of a file, or of a module such as verl.utils.reward_score."""
    if not rule.endswith(".py"):
        return getattr(importlib.import_module(rule), function)
    sys.path.insert(0, os.path.dirname(os.path.abspath(rule)))  # noqa: PTH100, PTH120
    spec = importlib.util.spec_from_file_location("rule_under_test", rule)
    module = importlib.util.module_from_spec(spec)
    sys.modules["rule_under_test"] = module
    spec.loader.exec_module(module)
    return getattr(module, function)


def judge(score, answer: dict) -> dict:
    """{"score": number} and what else the rule reports, or {"error": text}."""
    arguments = {name: answer.get(name) for name in ("data_source", "solution_str", "ground_truth")}
    try:
        result = score(**arguments, extra_info=dict(answer.get("extra_info") or {}))
    except BaseException as problem:  # SystemExit of a rule is an answer too
        return {"error": "{}: {}".format(type(problem).__name__, " ".join(str(problem).split())[:200])}
    details = (
        dict(result) if isinstance(result, dict) else {"score": result[0] if isinstance(result, tuple) else result}
    )
    return {name: plain(value) for name, value in details.items()} if "score" in details else {"error": "no score"}


def plain(value):
    """A JSON value: numbers and truth as they are, all else as text. NaN is a text: JSON has none."""
    with contextlib.suppress(Exception):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


if __name__ == "__main__":
    main()
