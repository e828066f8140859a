"""A fix is applied to the code it was written for, to nothing else, and never silently left out."""

from __future__ import annotations

import importlib
import itertools
import logging
import sys

import pytest

from atlasrl.trainer import patches

ORIGINAL = "def answer():\n    return 41  # off by one\n\n\nclass Box:\n    def size(self):\n        return 1\n"
counter = itertools.count()


@pytest.fixture
def registry(monkeypatch):
    """An empty registry, so that real fixes stay out of the way."""
    monkeypatch.setattr(patches, "_registry", [])
    monkeypatch.setattr(patches, "_outcomes", {})
    monkeypatch.setattr(patches, "_originals", [])
    monkeypatch.delenv(patches.WITHOUT, raising=False)


@pytest.fixture
def upstream(tmp_path, monkeypatch):
    """Name of an importable module with ORIGINAL as its text, new in every test."""
    name = f"upstream_{next(counter)}"
    (tmp_path / f"{name}.py").write_text(ORIGINAL)
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def declare(upstream, target="answer", expects="return 41", versions=">=1", package="pytest", id="off-by-one"):
    @patches.patch(
        id=id,
        reason="41 is wrong",
        upstream="PR #1",
        package=package,
        versions=versions,
        target=f"{upstream}:{target}",
        expects=expects,
    )
    def fix(original):
        return (lambda *a: original(*a) + 1) if original else (lambda: "filled")


def state(upstream):
    return {o.state for o in patches.outcomes() if o.target.startswith(upstream)}


def test_waits_for_the_import_and_then_fixes(registry, upstream):
    declare(upstream)
    patches.apply()
    assert upstream not in sys.modules
    assert state(upstream) == {"waiting"}
    assert importlib.import_module(upstream).answer() == 42
    assert state(upstream) == {"applied"}


def test_fixes_a_module_that_is_already_imported(registry, upstream):
    module = importlib.import_module(upstream)
    declare(upstream, target="Box.size", expects="return 1")
    patches.apply("off-by-one")
    assert module.Box().size() == 2


def test_is_applied_once_however_often_it_is_asked_for(registry, upstream):
    module = importlib.import_module(upstream)
    declare(upstream)
    patches.apply()
    patches.apply()
    assert module.answer() == 42


def test_changed_code_is_left_alone_and_reported_loudly(registry, upstream, caplog):
    declare(upstream, expects="return 40")
    patches.apply()
    with caplog.at_level(logging.WARNING):
        assert importlib.import_module(upstream).answer() == 41
    assert state(upstream) == {"does not apply"}
    assert "off-by-one does not apply" in caplog.text


def test_a_vanished_target_is_reported_not_raised(registry, upstream, caplog):
    declare(upstream, target="Box.gone")
    declare(upstream, target="Crate.size", id="other")
    patches.apply()
    importlib.import_module(upstream)
    assert state(upstream) == {"does not apply"}


@pytest.mark.parametrize(("package", "versions"), [("pytest", "<1"), ("no-such-package", ">=0")])
def test_another_version_is_not_needed_and_says_so(registry, upstream, package, versions):
    declare(upstream, package=package, versions=versions)
    patches.apply()
    assert importlib.import_module(upstream).answer() == 41
    (outcome,) = patches.outcomes()
    assert outcome.state == "not needed"
    assert package in outcome.detail


def test_a_fix_can_be_switched_off_for_a_negative_control(registry, upstream, monkeypatch):
    declare(upstream)
    declare(upstream, target="Box.size", expects="return 1", id="other")
    monkeypatch.setenv(patches.WITHOUT, "x, off-by-one")
    patches.apply()
    module = importlib.import_module(upstream)
    assert (module.answer(), module.Box().size()) == (41, 2)


def test_a_gap_is_filled_and_an_existing_attribute_is_never_overwritten(registry, upstream):
    declare(upstream, target="missing", expects=patches.ABSENT)
    declare(upstream, target="answer", expects=patches.ABSENT, id="exists")
    patches.apply()
    module = importlib.import_module(upstream)
    assert module.missing() == "filled"
    assert module.answer() == 41
    assert state(upstream) == {"applied", "not needed"}


def test_undone_fixes_leave_what_upstream_wrote_and_none_follows_later(registry, upstream, monkeypatch):
    monkeypatch.setattr(patches, "_hook", patches._AfterImport())  # others may wait in this process
    for target in ("answer", "Box.size"):
        declare(upstream, target=target, expects="return", id=target)
    declare(upstream, target="missing", expects=patches.ABSENT, id="gap")
    declare("json.tool", target="main", expects="def main", id="later")
    monkeypatch.delitem(sys.modules, "json.tool", raising=False)
    patches.apply()
    module = importlib.import_module(upstream)
    assert (module.answer(), module.Box().size(), module.missing()) == (42, 2, "filled")
    patches.undo()
    assert (module.answer(), module.Box().size(), hasattr(module, "missing")) == (41, 1, False)
    assert importlib.import_module("json.tool").main.__module__ == "json.tool"
    assert patches.outcomes() == []


def test_an_unknown_id_is_an_error(registry):
    with pytest.raises(KeyError, match="typo"):
        patches.apply("typo")


def test_the_listing_has_one_entry_per_fix_with_all_targets(registry, upstream):
    declare(upstream)
    declare(upstream, target="Box.size")
    (entry,) = patches.listing()
    assert entry["targets"] == [f"{upstream}:answer", f"{upstream}:Box.size"]
    assert entry["reason"] == "41 is wrong"
    assert "target" not in entry


def test_an_import_that_fails_can_be_repeated(registry, upstream, tmp_path):
    declare(upstream)
    patches.apply()
    file = tmp_path / f"{upstream}.py"
    file.write_text("raise ImportError('first time')\n")
    with pytest.raises(ImportError, match="first time"):
        importlib.import_module(upstream)
    file.write_text(ORIGINAL)
    importlib.invalidate_caches()
    assert importlib.import_module(upstream).answer() == 42
