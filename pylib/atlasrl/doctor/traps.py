"""Traps that no version number tells: what the installed code really does.

Sources: MindSpeed a25e413e (softmax_scale), mbridge PR 52 (device), verl docs/ascend_tutorial (build of vLLM, triton),
vllm-ascend v0.10.0rc1 worker_v1.py (sleep mode), and the fixes of atlasrl.trainer.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from atlasrl.doctor.expected import Expected
from atlasrl.doctor.finding import Finding, error, ok, warn
from atlasrl.doctor.host import Host

ATTENTION = (
    "mindspeed/core/context_parallel/dot_product_attention.py",
    "mindspeed/core/transformer/dot_product_attention.py",
    "mindspeed/core/transformer/flash_attention/alibi/dot_product_attention.py",
    "mindspeed/core/transformer/flash_attention/flash_attention/adaptor.py",
)
WRONG_SCALE = re.compile(r"sqrt\(\s*self\.hidden_size_per_attention_head\s*\)")
UNSUPPORTED = {"flash-attn": "MindSpeed brings its own", "liger-kernel": "it is for CUDA"}


def check_softmax_scale(host: Host, expected: Expected) -> Iterator[Finding]:
    """Attention of MindSpeed before a25e413e ignores softmax_scale: 7.6 % off for DeepSeek-V3, 22.5 % for Moonlight.

    Its version is 0.12.1 on every branch, so the code decides.
    """
    texts = {file: host.source(file) for file in ATTENTION}
    wrong = [
        file for file, text in texts.items() if text and "npu_fusion_attention" in text and WRONG_SCALE.search(text)
    ]
    if wrong:
        what = f"MindSpeed ignores softmax_scale ({len(wrong)} files, first {wrong[0]}): latent attention is wrong"
        yield error("softmax_scale", what, "check out a25e413e or later of branch 2.2.0_core_r0.12.1")
    elif any(texts.values()):
        yield ok("softmax_scale", "MindSpeed has the fix")


def check_mbridge(host: Host, expected: Expected) -> Iterator[Finding]:
    """Its `__version__` lies."""
    says = re.search(r"__version__\s*=\s*['\"]([^'\"]+)", host.source("mbridge/__init__.py") or "")
    installed = host.packages.get("mbridge")
    if says and installed and says[1] != installed:
        yield ok("mbridge", f"mbridge.__version__ says {says[1]}; the wheel is {installed}, which counts")


def check_vllm(host: Host, expected: Expected) -> Iterator[Finding]:
    """The build of vLLM and of vLLM-Ascend."""
    if any(any(folder.glob("_C*.so")) for folder in host.package("vllm")):
        remedy = "VLLM_TARGET_DEVICE=empty pip install -v -e . in vLLM's sources"
        yield error("vllm", "this is the CUDA build of vLLM", remedy)
    if re.search(r"__sleep_mode_enabled__\s*=\s*False", host.source("vllm_ascend/_build_info.py") or ""):
        remedy = "build it again with COMPILE_CUSTOM_KERNELS=1"
        yield error("vllm-ascend", "built without custom kernels: the rollout cannot sleep while training", remedy)


def check_conflicts(host: Host, expected: Expected) -> Iterator[Finding]:
    """Packages that must not be there, or not twice."""
    if {"triton", "triton-ascend"} <= host.packages.keys():
        remedy = "pip uninstall -y triton triton-ascend, then pip install triton-ascend"
        yield error("triton", "triton and triton-ascend are both installed into one folder", remedy)
    for name, reason in UNSUPPORTED.items():
        if name in host.packages:
            yield warn(
                "packages", f"{name} is installed and not supported on an NPU: {reason}", f"pip uninstall {name}"
            )
    for name, module in (("mbridge", "mbridge"), ("vllm", "vllm"), ("verl", "verl")):
        folders = [entry / module for entry in host.search if (entry / module / "__init__.py").is_file()]
        if len(folders) > 1:
            what = f"{name} is there twice; `import {module}` takes {folders[0]}, not {folders[1]}"
            yield error("packages", what, "remove one of the two, or its folder from PYTHONPATH")


def check_fixes(host: Host, expected: Expected) -> Iterator[Finding]:
    """Known faults of the trainer's packages: is each mended at start, and does the fix still find its place?"""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    from atlasrl.trainer import fixes
    from atlasrl.trainer.patches import ABSENT, WITHOUT, switched_off

    off, mended = switched_off(host.environment), set()
    for fix in fixes.declared().values():
        package, expects, target = fix["package"], fix["expects"], fix["targets"][0]
        version, text = host.packages.get(package), _target_text(host, target)
        if version is None or text is None or expects == ABSENT:
            continue
        within, name = SpecifierSet(fix["versions"]), f"fix {fix['id']}"
        if within.contains(version, prereleases=True):
            if expects not in text:
                what = f"{target} of {package} {version} is not the code it mends ({fix['reason']})"
                yield error(name, what, f"take the pinned {package}, or look whether {fix['upstream']} is in this one")
            elif fix["id"] in off:
                yield warn(name, f"switched off by {WITHOUT}: {fix['reason']}", f"unset {WITHOUT}")
            else:
                mended.add(fix["id"])
        elif expects in text and within.contains(Version(version).base_version):
            what = f"{package} {version} counts as older than {fix['versions']} and has its code: {fix['reason']}"
            yield warn(name, f"not applied: {what}", f"see {fix['upstream']}")
    if mended:
        yield ok("fixes", f"{len(mended)} known faults are mended at start: {', '.join(sorted(mended))}")


def _target_text(host: Host, target: str) -> str | None:
    """Source of `module:Owner.attribute`, read from the file; the whole module where it is not defined in it."""
    module, _, attribute = target.partition(":")
    path = module.replace(".", "/")
    text = host.source(f"{path}.py") or host.source(f"{path}/__init__.py")
    if text is None:
        return None
    scope: ast.AST = ast.parse(text)
    for name in attribute.split("."):
        scope = next((node for node in ast.iter_child_nodes(scope) if getattr(node, "name", None) == name), None)
        if scope is None:
            return text
    return "\n".join(text.splitlines()[scope.lineno - 1 : scope.end_lineno]) + "\n"
